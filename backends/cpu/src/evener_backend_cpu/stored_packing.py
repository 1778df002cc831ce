"""Weights of one byte an element (float8, int8) with scales, as they are stored.

The rows keep their bytes; scales become float32. The kernels convert an element to the compute dtype, which holds it
exactly, sum the products of a block in float32, and multiply the sum by the block's scale. Activations are not rounded.
Plain parts of the same layer stay plain.
"""

from __future__ import annotations

import torch

from evener.contracts.quant import WeightPart
from evener_backend_cpu.native_library import Stored
from evener_backend_cpu.segments import PackedPart, SegmentPacking

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


class StoredPacking(SegmentPacking):
    """Row-major bytes and float32 scales."""

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
        high, wide = block_of(part)
        return part.rows * part.columns + -(-part.rows // high) * -(-part.columns // wide) * _SCALE_BYTES

    def _pack_part(self, part: WeightPart) -> PackedPart:
        stored, dtype, shape = part.tensors["weight"], getattr(torch, part.format.storage), (part.rows, part.columns)
        if tuple(stored.shape) != shape or stored.dtype is not dtype:
            raise ValueError(f"{part.name} is {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
        weight = self._room(shape, dtype).copy_(stored)
        high, wide = block_of(part)
        blocks = -(-part.columns // wide)
        scale = part.tensors["scale"].float().reshape(-(-part.rows // high), blocks).clone()
        struct = Stored(weight.data_ptr(), scale.data_ptr(), high, wide, blocks)
        return PackedPart(KINDS[part.format.storage], (weight, scale), struct)
