"""Adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Only what LoRA itself is (Hu et al. 2021; rank-stabilized scales: Kalajdzievski 2023) is read. Everything in the config
that would change the result in another way, and every key that is not known, is refused: the weights would be wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from evener.contracts.adapters import AdapterLimits, AdapterTensor
from evener.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES, _MAX_HEADER_BYTES, _MAX_PATTERNS = 1 << 20, 16 << 20, 4096
#: safetensors' dtypes, ours, and the bits of a number's exponent: with all of them set, it is not finite.
_DTYPES: Mapping[str, tuple[str, str, int]] = {
    "F32": ("float32", "<u4", 0x7F80_0000), "F16": ("float16", "<u2", 0x7C00), "BF16": ("bfloat16", "<u2", 0x7F80),
}  # fmt: skip
#: Keys of the config that are read here.
_READ = {"peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
#: Keys that say how the adapter was trained, or again what the names of its tensors say.
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "torch_dtype",
}  # fmt: skip
#: Ways to begin that leave the model's own weights as they are; others, such as PiSSA, change them too.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_PLAIN_NAME = re.compile(r"\^?[A-Za-z0-9_.]+")


def read_adapter(folder: Path, limits: AdapterLimits) -> list[AdapterTensor] | None:
    """The adapter in a folder; None if the folder has no ``adapter_config.json``.

    Raises:
        CheckpointError: it cannot be used, or is not for this model.
    """
    if not os.path.lexists(folder / CONFIG):
        return None
    config = _Config(folder / CONFIG)
    sizes = sum(rows + columns for rows, columns in limits.targets.values())
    found = _tensors(folder / WEIGHTS, 4 * limits.rank * sizes + _MAX_HEADER_BYTES)
    halves: dict[str, dict[str, Any]] = {}
    for name, tensor in found:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _refusal(folder, f"{_short(name)} is not lora_A or lora_B of a linear layer")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    if not halves:
        raise _refusal(folder, f"{WEIGHTS} has no tensor")
    return [_part(folder, module, pair, config, limits) for module, pair in sorted(halves.items())]


def _part(folder: Path, module: str, pair: Mapping[str, Any], config: _Config, limits: AdapterLimits) -> AdapterTensor:
    target, shown = limits.targets.get(f"{module}.weight"), _short(module)
    if target is None:
        names = ", ".join(sorted({name.split(".")[-2] for name in limits.targets if "." in name}))
        raise _refusal(folder, f"{shown} is no layer of this model that can have an adapter; those are {names}")
    if pair.keys() != {"A", "B"}:
        raise _refusal(folder, f"{shown} has lora_{next(iter(pair))} only")
    down, up = pair["A"], pair["B"]
    if down["dtype"] != up["dtype"] or down["dtype"] not in _DTYPES:
        kinds = f"{down['dtype']} and {up['dtype']}"
        raise _refusal(folder, f"{shown} is stored as {kinds}; both have to be one of {', '.join(_DTYPES)}")
    rank, (rows, columns) = config.rank(module), target
    if rank > limits.rank:
        raise CheckpointError(f"{folder}: {shown} has rank {rank}; start with infer.max_lora_rank={rank} or more")
    if down["shape"] != [rank, columns] or up["shape"] != [rows, rank]:
        raise _refusal(folder, f"{shown} has shapes {down['shape'][:4]} and {up['shape'][:4]}, but rank {rank} of this "
                               f"model's layer takes {[rank, columns]} and {[rows, rank]}")  # fmt: skip
    dtype, bits, exponent = _DTYPES[down["dtype"]]
    for half in (down, up):
        numbers = np.frombuffer(half["data"], dtype=bits)
        if ((numbers & exponent) == exponent).any():
            raise _refusal(folder, f"{shown} has a number that is not finite")
    return AdapterTensor(f"{module}.weight", rank, config.scale(module), dtype, bytes(down["data"]), bytes(up["data"]))


class _Config:
    """``adapter_config.json``, checked."""

    def __init__(self, path: Path) -> None:
        self._folder = folder = path.parent
        try:
            values = json.loads(_read_file(path, _MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            raise _refusal(folder, f"{CONFIG} is not JSON: {str(error)[:200]}") from error
        if not isinstance(values, dict):
            raise _refusal(folder, f"{CONFIG} is not a JSON object")
        if values.get("peft_type") != "LORA":
            raise _refusal(folder, f"peft_type is {_short(values.get('peft_type'))}; only LORA can be used")
        if values.get("bias", "none") != "none":
            raise _refusal(folder, f"bias is {_short(values['bias'])}; only adapters without biases can be used")
        start = values.get("init_lora_weights")
        if not isinstance(start, bool | str | None) or start not in _STARTS:
            raise _refusal(folder, f"init_lora_weights is {_short(start)}, which changes the model's own weights; save "
                                   "the adapter converted to plain LoRA")  # fmt: skip
        for key, value in values.items():
            if value and key not in _READ | _NO_EFFECT:
                raise _refusal(folder, f"{_short(key)} is {_short(value)}, which is not supported; only plain LoRA of "
                                       "linear layers can be used")  # fmt: skip
        self._rank, self._alpha = values.get("r"), values.get("lora_alpha")
        self._ranks, self._alphas = (self._patterns(values, f"{of}_pattern") for of in ("rank", "alpha"))
        self._root = bool(values.get("use_rslora"))
        for rank in (self._rank, *self._ranks.values()):
            if type(rank) is not int or rank < 1:
                raise _refusal(folder, f"{CONFIG} gives the rank as {_short(rank)}; it is an integer of at least 1")
        for alpha in (self._alpha, *self._alphas.values()):
            if type(alpha) not in (int, float) or not abs(alpha) <= 1e6:
                raise _refusal(folder, f"{CONFIG} gives alpha as {_short(alpha)}; it is a number of at most 1e6")

    def _patterns(self, values: Mapping[str, Any], key: str) -> dict[str, Any]:
        found = values.get(key) or {}
        if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
            raise _refusal(self._folder, f"{key} is not an object of at most {_MAX_PATTERNS} names")
        for name in found:
            if not _PLAIN_NAME.fullmatch(name):
                raise _refusal(self._folder, f"{key} has {_short(name)}; only names of layers, whole or their last "
                                             "parts, can be used")  # fmt: skip
        return found

    def rank(self, module: str) -> int:
        """The rank of a layer's adapter."""
        return int(_of(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """The factor on the product of both matrices."""
        rank = self.rank(module)
        return float(_of(self._alphas, module, self._alpha)) / (math.sqrt(rank) if self._root else rank)


def _of(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first name that is the module's, or its last parts."""
    return next((value for name, value in patterns.items() if _names(name, module)), default)


def _names(name: str, module: str) -> bool:
    return module == name.removeprefix("^") or (name[0] != "^" and module.endswith(f".{name}"))


def _tensors(path: Path, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, dtype, shape and bytes of each tensor. The library checks that ranges fit shapes and cover the file."""
    if not os.path.lexists(path):
        raise _refusal(path.parent, f"there is no {WEIGHTS}; other files, such as adapter_model.bin, are not read")
    data = _read_file(path, most)
    if int.from_bytes(data[:8], "little") > _MAX_HEADER_BYTES:
        raise _refusal(path.parent, f"the header of {WEIGHTS} has more than {_MAX_HEADER_BYTES:,} bytes")
    try:
        yield from deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise _refusal(path.parent, f"{WEIGHTS} is damaged: {str(error)[:200]}") from error


def _read_file(path: Path, most: int) -> bytes:
    """A regular file of at most ``most`` bytes. It is opened without waiting: a pipe would never answer."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _refusal(path.parent, f"{path.name} is not a regular file")
            if status.st_size > most:
                raise _refusal(path.parent, f"{path.name} has {status.st_size:,} bytes; an adapter of this model with "
                                            f"infer.max_lora_rank has at most {most:,}")  # fmt: skip
            return file.read(status.st_size)
    except OSError as error:
        raise _refusal(path.parent, f"{path.name} cannot be read: {error.strerror}") from error


def _refusal(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the adapter in {folder} cannot be used: {why}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "…"
