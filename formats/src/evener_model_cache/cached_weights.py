"""Filling a rank's weights from its cache file, or loading them and writing one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from evener.contracts.declared import Declared, LinearWeight, Weight
from evener.contracts.device import Device
from evener.contracts.quant import PackedWeight, Packing
from evener.engine.worker.assembly import Assembly
from evener.errors import ConfigError
from evener.folders.cache import cache_folder
from evener.loading.loader import Ledger, WeightBytes
from evener.loading.uploader import BUFFER_BYTES, BUFFER_COUNT, Uploader
from evener_model_cache.cache_file import MAX_HEADER, CacheFile, Unusable, prepare_folder, write_cache
from evener_model_cache.chosen import numbered, tensors_of, worth_saving
from evener_model_cache.fingerprint import differences, fingerprint_of, slot_name

log = logging.getLogger("evener.model_cache")


def load_cached(
    a: Assembly, declared: Sequence[Declared], packings: Mapping[str, Packing], where: torch.device,
    pinned: Device | None, load: Callable[[Sequence[Declared]], WeightBytes],
) -> WeightBytes:  # fmt: skip
    """Fill ``value`` of every declared weight and table: what the cache file of this rank holds from there, and the
    rest from the checkpoint. Without a file that fits, load all of it, and then write one. The log says which, and why.

    Args:
        declared: weights of one place, the device or the host.
        packings: by layout.
        where: the device.
        pinned: copies through its page-locked memory; None: without.
        load: fills some of ``declared`` from the checkpoint, and returns their bytes.

    Raises:
        ConfigError: the folder cannot be used, or there is no checkpoint whose weights could be kept.
        CheckpointError: as ``load``.
    """
    asked = a.config.config.model_cache
    if a.config.config.load == "dummy":
        raise ConfigError(f"model_cache={asked} keeps weights of a checkpoint; load=dummy reads none: leave out one")
    folder = (cache_folder("weights") if asked in (None, "auto") else Path(str(asked)).expanduser()).absolute()
    prepare_folder(folder)
    wanted = numbered(worth_saving(declared, frozenset(a.checkpoint.copied), a.headers, a.scheme))
    path = folder / slot_name(a, any(item.placement is not None for item in declared))
    if not wanted:
        log.info("model cache: nothing to keep, the checkpoint's own weights are read as they are")
        return load(declared)
    began = time.monotonic()
    try:
        fingerprint = fingerprint_of(a, declared, folder)
    except Unusable as reason:
        log.warning("model cache: not used, %s", reason)
        return load(declared)
    problem = ""
    try:
        restored, counted = _restore(path, fingerprint, wanted, packings, where, pinned)
    except Unusable as reason:
        # Only noted: while it is handled, it keeps the file open, and what was made of it in memory.
        problem = str(reason)
    if problem:
        log.info("model cache: %s is not loaded: %s", path.name, problem)
        counted = load(declared)
        _write(path, fingerprint, wanted, packings)
        return counted
    for item in wanted.values():
        if id(item) in restored:
            item.value = restored[id(item)]
    more = load([item for item in declared if id(item) not in restored])
    log.info("model cache: %d weights from %s in %.1f s", len(restored), path.name, time.monotonic() - began)
    return replace(counted, allocated=counted.allocated + more.allocated, mapped=counted.mapped + more.mapped)


def _restore(
    path: Path, fingerprint: Mapping[str, str], wanted: Mapping[str, Weight | LinearWeight],
    packings: Mapping[str, Packing], where: torch.device, pinned: Device | None,
) -> tuple[dict[int, torch.Tensor | PackedWeight], WeightBytes]:  # fmt: skip
    """The values that a cache file holds, by ``id`` of their declared weights, and their bytes.

    Raises:
        Unusable: there is no file, or it is not one of these weights; nothing of it is used.
    """
    expected = sum(_nbytes(item, packings) for item in wanted.values())
    with closing(CacheFile(path, limit=2 * expected + MAX_HEADER)) as file:
        if changed := differences(file.index.fingerprint, fingerprint):
            raise Unusable("; ".join(changed[:6]) + (f"; … ({len(changed)} in all)" if len(changed) > 6 else ""))
        if not file.index.weights.keys() <= wanted.keys():
            raise Unusable("it holds other weights")
        buffers = pinned.pinned_buffers(BUFFER_COUNT, BUFFER_BYTES) if pinned else ()
        with closing(Uploader(pinned, buffers)) if pinned and buffers else nullcontext() as uploader:
            return _Restoring(file, packings, where, uploader).values(wanted)


class _Restoring:
    """Makes weights from the tensors of a file; a tensor that several of them have is moved to the device once."""

    def __init__(
        self, file: CacheFile, packings: Mapping[str, Packing], where: torch.device, uploader: Uploader | None
    ) -> None:
        self._file, self._packings, self._where, self._uploader = file, packings, where, uploader
        self._moved: dict[int, torch.Tensor] = {}
        self._ledger = Ledger()

    def values(
        self, wanted: Mapping[str, Weight | LinearWeight]
    ) -> tuple[dict[int, torch.Tensor | PackedWeight], WeightBytes]:
        made, shared = {}, {}
        for name, item in wanted.items():
            if (numbers := self._file.index.weights.get(name)) is not None:
                # A quantized table and the head that is tied to it are one weight.
                parts = item.parts if isinstance(item, LinearWeight) else ()
                key = getattr(item, "layout", None), tuple((p.name, p.rows, p.columns) for p in parts), *numbers
                if not parts or key not in shared:
                    shared[key] = self._value(item, [self._tensor(number) for number in numbers])
                made[id(item)] = shared[key]
        return made, self._ledger.bytes

    def _value(self, item: Weight | LinearWeight, tensors: Sequence[torch.Tensor]) -> torch.Tensor | PackedWeight:
        if isinstance(item, LinearWeight):
            packing = self._packings[item.layout]
            try:
                packed = packing.restored(tensors, item.parts, item.experts, item.dtype, self._where)
            except ValueError as error:
                raise Unusable(f"it is damaged ({item.name}: {error})") from error
            self._ledger.add(list(packing.saved(packed) or ()), packed.nbytes)
            return packed
        if [(tuple(t.shape), t.dtype) for t in tensors] != [(tuple(item.shape), getattr(torch, item.dtype))]:
            raise Unusable(f"it is damaged ({item.name} has another shape)")
        self._ledger.add(tensors[0], tensors[0].nbytes)
        return tensors[0]

    def _tensor(self, number: int) -> torch.Tensor:
        if not 0 <= number < len(self._file.index.tensors):
            raise Unusable("it is damaged (a weight names a tensor that is not there)")
        if number not in self._moved:
            mapped = self._file.tensor(number)
            if self._uploader is not None:
                self._moved[number] = self._uploader.move(str(number), mapped, self._file.extent(number))
            elif self._where.type == "cpu":
                self._moved[number] = self._ledger.note_mapped(mapped)
            else:
                self._moved[number] = mapped.to(self._where)
        return self._moved[number]


def _write(
    path: Path, fingerprint: Mapping[str, str], wanted: Mapping[str, Weight | LinearWeight],
    packings: Mapping[str, Packing],
) -> None:  # fmt: skip
    """Write the cache file of loaded weights. A start does not fail because of it: the log says why there is none."""
    began, chosen = time.monotonic(), tensors_of(wanted, packings)
    if not chosen.weights:
        log.info("model cache: nothing to keep, the layouts of these weights cannot be saved")
        return
    try:
        nbytes = write_cache(path, fingerprint, chosen.tensors, chosen.weights)
    except (Unusable, OSError) as reason:
        log.warning("model cache: %s is not written: %s", path, reason)
        return
    log.info("model cache: wrote %s, %.2f GB, in %.1f s", path, nbytes / 1e9, time.monotonic() - began)


def _nbytes(item: Weight | LinearWeight, packings: Mapping[str, Packing]) -> int:
    if isinstance(item, LinearWeight):
        return max(1, item.experts) * packings[item.layout].nbytes(item.parts, item.dtype)
    return math.prod(item.shape) * int(getattr(torch, item.dtype).itemsize)
