"""Weights of one byte an element (float8, int8) with scales, as they are stored.

The rows keep their bytes; scales become float32. The kernels convert an element to the compute dtype, which holds it
exactly, sum the products of a block in float32, and multiply the sum by the block's scale. They do not round
activations; ``int8_products`` does in large steps, and needs the fixed scale of activations that an int8 part may have.
Plain parts of the same layer stay plain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.quant import Rounding, WeightPart
from evener_backend_cpu.native_library import Stored
from evener_backend_cpu.segments import MISSING, PackedPart, SegmentPacking

LAYOUT = "cpu.stored"
#: By storage; ``enum StoredKind`` in stored_gemm.h.
KINDS = {"float8_e4m3fn": 64, "float8_e5m2": 65, "int8": 66}
_SCALES = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
#: Bytes of a scale, once packed.
_SCALE_BYTES = 4


def block_of(part: WeightPart) -> tuple[int, int]:
    """Rows and columns of ``part`` that share a scale."""
    form = part.format
    if form.group == -1:
        return part.rows, part.columns
    return form.group_out, form.group or part.columns


def has_fixed_scale(part: WeightPart) -> bool:
    """Whether ``part`` has a fixed scale with which activations may be rounded to int8."""
    return part.format.storage == "int8" and part.format.activation == Rounding("int8", -1)


class StoredPacking(SegmentPacking):
    """Row-major bytes and float32 scales; of a part that ``has_fixed_scale``, this too, float32 [1]."""

    layout = LAYOUT

    def _refusal(self, part: WeightPart) -> str | None:
        form = part.format
        if form.storage not in KINDS:
            return f"reads {', '.join(KINDS)}, not {form.storage}"
        if form.scale not in _SCALES:
            return f"reads scales in {', '.join(_SCALES)}, not {form.scale}"
        if form.zero is not None or form.order != "row":
            return "does not know zero points or orders of columns"
        return None

    def _quantized_bytes(self, part: WeightPart) -> int:
        high, blocks = _scale_shape(part)
        return part.rows * part.columns + (high * blocks + has_fixed_scale(part)) * _SCALE_BYTES

    def _pack_part(self, part: WeightPart) -> PackedPart:
        stored, dtype, shape = part.tensors["weight"], getattr(torch, part.format.storage), (part.rows, part.columns)
        if tuple(stored.shape) != shape or stored.dtype is not dtype:
            raise ValueError(f"{part.name} is {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
        weight = self._room(shape, dtype).copy_(stored)
        fixed = [part.tensors["activation_scale"].float().reshape(1).clone()] if has_fixed_scale(part) else []
        return self._described(part, weight, part.tensors["scale"].float().reshape(_scale_shape(part)).clone(), *fixed)

    def _restored_part(self, part: WeightPart, tensors: Iterator[torch.Tensor]) -> PackedPart:
        weight = self._kept(next(tensors, MISSING), (part.rows, part.columns), getattr(torch, part.format.storage))
        shapes = [_scale_shape(part), *([(1,)] if has_fixed_scale(part) else [])]
        scales = [self._kept(next(tensors, MISSING), shape, torch.float32) for shape in shapes]
        return self._described(part, weight, *scales)

    def _described(
        self, part: WeightPart, weight: torch.Tensor, scale: torch.Tensor, *fixed: torch.Tensor
    ) -> PackedPart:
        (high, wide), (_, blocks) = block_of(part), scale.shape
        struct = Stored(weight.data_ptr(), scale.data_ptr(), high, wide, blocks)
        return PackedPart(KINDS[part.format.storage], (weight, scale, *fixed), struct)


def _scale_shape(part: WeightPart) -> tuple[int, int]:
    high, wide = block_of(part)
    return -(-part.rows // high), -(-part.columns // wide)
