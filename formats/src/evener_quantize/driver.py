"""Layer after layer: run it over the text, quantize its matrices, run it again as quantized, write it. Memory holds one
layer, what is remembered of its inputs, and the stream between two layers. Interrupted, it goes on behind the last
layer that was written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from evener_convert.carried import carry, write_json
from evener_convert.pieces import Stored, whole_pieces
from evener_convert.source import description, open_source, shared_out
from evener_convert.work import refuse_existing, work_folder
from evener_convert.writer import WeightFile, forget_notes, write_file
from safetensors.torch import load_file, save

from evener.backend_search import BackendSearch
from evener.config.checkpoint import facts_of
from evener.config.schema import Config
from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.conversion.views import CheckpointView
from evener.errors import CheckpointError, ConfigError, EngineError
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_checkpoint, open_files
from evener_quantize.chosen import Chosen, choose
from evener_quantize.layer import LayerMaker
from evener_quantize.observed import Inputs, Key, Observer
from evener_quantize.settings import Settings
from evener_quantize.stage import Stage, stage_config

#: Bytes of what is remembered of inputs at a time; a layer with more (experts) runs over the text several times.
REMEMBERED = 2 << 30
#: In the metadata of a layer's file: how many of its matrices, all of experts, got no input from the text.
_WITHOUT = "evener_without_input"
#: Called after each layer with its number, from 1, and the number of layers.
Report = Callable[[int, int], None]


def quantize(
    config: Config, result: Path, settings: Settings, text: str = "", report: Report = lambda layer, count: None
) -> dict[str, Any]:
    """Quantize the model of ``config`` to the folder ``result``.

    Args:
        text: what inputs are taken from; not read with ``settings.nearest``.
        report: called after each layer with its number, from 1, and the number of layers.

    Returns the number of weight files and their bytes, how many matrices were quantized from how many tokens, and how
    many of them the text never reached: matrices of experts, which are only rounded.

    Raises:
        EvenerError: the model cannot be read, run or be stored in this way, or the disk is too small; then there is no
            ``result``.
    """
    refuse_existing(result)
    if result.suffix == ".gguf":
        raise ConfigError("evener quantize writes a folder; use `evener convert SRC DST.gguf quant=q4_k_m` for GGUF")
    source = open_source(config)
    chosen = choose(source, settings)
    longest = facts_of(config.model, source.checkpoint.config, source.family.max_positions).max_positions
    settings = replace(settings, window=min(settings.window, longest or settings.window))
    ids = [] if settings.nearest else _ids(config, text, settings.tokens)
    read = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    facts = {**settings.to_json(), "dtype": config.dtype, "ids": read, "count": len(ids)}
    key = {**description(source), "quantize": facts}
    rest = _Rest(source.checkpoint, chosen)
    with work_folder(result, key) as folder:
        layers = _Layers(folder, stage_config(config, chosen.layers, settings.window), chosen, settings, ids)
        _check_room(folder, rest, chosen)
        for layer in layers.remaining():
            layers.make(layer)
            report(layer + 1, chosen.layers)
        layers.forget_streams()
        where, without = _write_rest(folder, rest, layers)
        carry(Path(config.model).expanduser(), rest, folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        write_json(folder / "model.safetensors.index.json",
                   {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})  # fmt: skip
        write_json(folder / "evener_quantize.json", key)
    source.checkpoint.close()
    return {"path": str(result), "files": len(sizes), "bytes": sum(sizes.values()), "matrices": len(chosen.names),
            "tokens": len(ids), "group": chosen.group, "without_input": without}  # fmt: skip


class _Layers:
    """The layers of one run, and their files in its folder."""

    def __init__(self, folder: Path, config: Config, chosen: Chosen, settings: Settings, ids: Sequence[int]) -> None:
        self._folder, self._config, self._chosen, self._settings = folder, config, chosen, settings
        self._maker, self._observer = LayerMaker(settings, chosen), Observer()
        self._windows = [ids[at : at + settings.window] for at in range(0, len(ids), settings.window)]

    @cached_property
    def _search(self) -> BackendSearch:
        return BackendSearch(self._config.backend)

    def file(self, layer: int) -> Path:
        """The weight file of a layer."""
        return self._folder / f"model-layer-{layer:04}.safetensors"

    def _stream(self, layer: int) -> Path:
        """The file with the stream before a layer."""
        return self._folder / f"stream-{layer:04}.unfinished"

    def remaining(self) -> range:
        """The layers that are not written yet."""
        count = self._chosen.layers
        done = next((layer for layer in range(count) if not self.file(layer).exists()), count)
        while 0 < done < count and self._windows and not self._stream(done).exists():
            done -= 1
        return range(done, count)

    def make(self, layer: int) -> None:
        """Write a layer's file, then the stream behind it."""
        stage = Stage(self._config, self._search, layer, self._chosen.layers, self._observer)
        before = load_file(self._stream(layer))["stream"] if layer and self._windows else torch.empty(0)
        made: dict[str, torch.Tensor] = {}
        without = 0
        for keys in self._maker.batches(stage, REMEMBERED):
            seen = {key: Inputs.none(n, stage.assembly.device.torch_device) for key, n in keys.items()}
            self._observer.watched = seen
            for window, stream in self._pieces(before):
                stage.run(window, stream)
            self._observer.watched = {}
            self._check(stage, seen)
            without += sum(not inputs.count for inputs in seen.values() if inputs.remembered)
            made |= self._maker.fold(stage, seen)
            made |= self._maker.quantize(stage, seen)
        _save(made, self.file(layer), {_WITHOUT: str(without if self._windows else 0)})
        if self._windows and layer + 1 < self._chosen.layers:
            width = stage.assembly.model.hidden_size
            after = before if layer else torch.empty(sum(map(len, self._windows)), width)
            for window, stream in self._pieces(after):
                stream.copy_(stage.run(window, stream))
            _save({"stream": after}, self._stream(layer + 1))
        self._stream(layer).unlink(missing_ok=True)

    def forget_streams(self) -> None:
        """Remove what only a run that goes on needs."""
        for path in (*self._folder.glob("stream-*"), *self._folder.glob("*.part")):
            path.unlink()

    def _check(self, stage: Stage, seen: Mapping[Key, Inputs]) -> None:
        unseen = {name for (name, expert), inputs in seen.items() if expert < 0 and not inputs.count}
        if unseen and self._windows:
            raise EngineError(
                f"{', '.join(sorted(unseen))}: the model computes with this in a way whose inputs are not seen; keep "
                'it as it is with formats.quant_rules={"re:NAME": "none"}'
            )

    def _pieces(self, stream: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """The windows, each with its part of the stream."""
        at = 0
        for window in self._windows:
            yield window, stream[at : at + len(window)]
            at += len(window)


class _Rest(CheckpointView):
    """What of a checkpoint is not made by layers: stored as it is, beside a config that says how the others are."""

    changes = "numbers"

    def __init__(self, inner: Checkpoint, chosen: Chosen) -> None:
        super().__init__(inner)
        self._chosen, self.made = chosen, frozenset[str]()

    @classmethod
    def of(cls, request: object) -> None:
        """None: no checkpoint is read in this way."""

    @property
    def headers(self) -> Headers:
        left_out = self._chosen.names | self.made
        return {name: each for name, each in self.inner.headers.items() if name not in left_out}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return {**self.inner.config, "quantization_config": dict(self._chosen.config)}


def _write_rest(folder: Path, rest: _Rest, layers: _Layers) -> tuple[dict[str, str], int]:
    """Write what the layers did not make, under the names that the result has. Returns the file of each tensor, and how
    many matrices got no input."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    without = 0
    made = [layers.file(layer) for layer in range(layers.remaining().stop)]
    for path in made:
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
            without += int((file.metadata() or {}).get(_WITHOUT, 0))
    rest.made = frozenset(found)
    for name, pieces in shared_out(whole_pieces(rest), "model-rest"):
        write_file(folder, WeightFile.safetensors(name, pieces), rest.tensor, lambda nbytes: None)
        found |= {tensor: name for piece in pieces for tensor in piece.stored}
    forget_notes(folder)
    return found, without


def _check_room(folder: Path, rest: _Rest, chosen: Chosen) -> None:
    headers = {**rest.headers, **chosen.headers}
    needed = sum(Stored(*each).nbytes for each in headers.values() if hasattr(torch, each[0]))
    free = shutil.disk_usage(folder).free + sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    if needed > free:
        raise ConfigError(
            f"{folder.parent} has {free:,} bytes free, and the result needs {needed:,}; choose another place"
        )


def _save(tensors: Mapping[str, torch.Tensor], path: Path, more: Mapping[str, str] | None = None) -> None:
    """Write a file as a whole, so that after a loss of power it is there or not."""
    part = path.with_name(f"{path.name}.part")
    # Not the library's own writer of files, whose files others may not read.
    part.write_bytes(save({name: tensor.clone() for name, tensor in tensors.items()}, {"format": "pt", **(more or {})}))
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _ids(config: Config, text: str, most: int) -> list[int]:
    files = open_files(config.tokenizer) if config.tokenizer else open_checkpoint(config.model)
    tokenizer = Tokenizer.of(files)
    if tokenizer is None:
        raise ConfigError(f"{config.tokenizer or config.model} has no tokenizer; give its folder: tokenizer=DIR")
    ids = list(tokenizer.encode(text)[:most])
    if not ids:
        raise CheckpointError("--data has no tokens; give a text like what the model will be used for")
    return ids
