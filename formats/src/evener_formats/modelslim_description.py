"""``quant_model_description.json``: what ModelSlim writes about each tensor of a checkpoint, as ``{tensor: kind}``,
with a few keys about the whole model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError

FILE = "quant_model_description.json"
#: Older versions add the kind of most weights to the name.
_PATTERN = "quant_model_description*.json"
FLOAT = "FLOAT"
#: Kinds of weights that are read, and bits of a number. The A is about activations.
BITS: Mapping[str, int] = {
    "W8A8": 8, "W8A8_DYNAMIC": 8, "W8A8_MIX": 8, "W8A16": 8, "WFP8AFP8_DYNAMIC": 8, "W4A16": 4, "W4A8_DYNAMIC": 4,
}  # fmt: skip
FLOATS = ("WFP8AFP8_DYNAMIC",)
#: Endings of tensors that change what a layer computes, in ways that are not read; and what they are.
_UNREAD: Mapping[str, str] = {
    ".kv_cache_scale": "a quantized KV cache (C8)", ".kv_cache_offset": "a quantized KV cache (C8)",
    ".fa_q.scale": "quantized attention (FAQuant)", ".fa_k.scale": "quantized attention (FAQuant)",
    ".fa_v.scale": "quantized attention (FAQuant)", ".div.mul_scale": "activations that are divided before a layer",
    ".left_trans": "activations that are transformed before a layer (FlatQuant)",
    ".right_trans": "activations that are transformed before a layer (FlatQuant)",
    ".clip_ratio": "activations that are clipped before a layer (FlatQuant)",
}  # fmt: skip
_AGAIN = (
    "quantize the original model again without it, or give the original model and type quant=int8; for keys and values "
    "in eight bits, type infer.kv_dtype=int8"
)


def description_name(files: ModelFiles) -> str | None:
    """The name of a model's description; None if it has none.

    Raises:
        CheckpointError: there are several, none of them with the usual name.
    """
    if files.text(FILE) is not None:
        return FILE
    found = [name for name in files.names(_PATTERN) if not name.endswith(".index.json")]
    if len(found) > 1:
        raise CheckpointError(
            f"{files.path} has {len(found)} descriptions of its weights, {', '.join(found[:5])}; keep the one that "
            f"belongs to them, under the name {FILE}"
        )
    return found[0] if found else None


@dataclass(frozen=True)
class Description:
    """A checkpoint's description.

    Attributes:
        file: its name, for messages.
        kinds: of tensors, by their names.
        packed: whether numbers of four bits are stored two in a byte; else each has its own.
    """

    file: str
    kinds: Mapping[str, str]
    packed: bool

    @classmethod
    def of(cls, files: ModelFiles) -> Description:
        """
        Raises:
            CheckpointError: there is none, or it tells of what is not read.
        """
        name = description_name(files)
        if name is None:
            raise CheckpointError(
                f"{files.path} has no {FILE}, which says how ModelSlim stored each weight; fetch the file"
            )
        stored = files.json(name)
        kinds = {tensor: kind for tensor, kind in stored.items() if isinstance(kind, str)}
        for tensor in kinds:
            what = next((what for ending, what in _UNREAD.items() if tensor.endswith(ending)), None)
            if what is not None:
                raise CheckpointError(f"{name} names {tensor[:200]}: {what}, which is not read; {_AGAIN}")
        layers = _rotated(stored.get("metadata"))
        if layers:
            raise CheckpointError(
                f"{name} says that the inputs of {layers} are rotated while the model runs (QuaRot), which is not "
                f"read; {_AGAIN}"
            )
        return cls(name, kinds, "version" in stored)

    def kind(self, tensor: str) -> str | None:
        """The kind of a tensor; None if the file does not name it. A name that got a first part since, as "model.", is
        found without it."""
        return self.kinds.get(tensor) or self.kinds.get(tensor.partition(".")[2])


def _rotated(metadata: Any) -> str:
    """The first layer whose inputs are rotated; empty if there is none."""
    rotations = metadata.get("quarot") if isinstance(metadata, Mapping) else metadata
    if rotations is not None and not isinstance(rotations, Mapping):
        raise CheckpointError(
            f"the metadata or metadata.quarot of {FILE} is {str(rotations)[:40]!r}, not a map, so it does not say "
            "whether inputs are rotated; fetch the file again"
        )
    for rotation in (rotations or {}).values():
        layers = rotation.get("layers") if isinstance(rotation, Mapping) else rotation
        if layers:
            return str(layers[0] if isinstance(layers, list) else layers)[:200]
    return ""
