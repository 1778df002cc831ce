"""Weights of one byte an element (float8, int8) with scales, as they are stored.

The rows keep their bytes; scales become float32. The kernels convert an element to the compute dtype, which holds it
exactly, sum the products of a block in float32, and multiply the sum by the block's scale. Activations are not rounded.
Plain parts of the same layer stay plain.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.quant import DTYPE_BYTES, PackedWeight, Packing, WeightPart
from evener_backend_cpu.block_packing import BlockData
from evener_backend_cpu.huge_pages import Arena
from evener_backend_cpu.native_library import DTYPES, Blocks, Native, Segment, Stored

LAYOUT = "cpu.stored"
#: By storage; ``enum StoredKind`` in stored_gemm.h.
KINDS = {"float8_e4m3fn": 64, "float8_e5m2": 65, "int8": 66}
_SCALES = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
#: Bytes of a scale, once packed.
_SCALE_BYTES = 4


class _Device(Protocol):
    @property
    def native(self) -> Native | Unavailable: ...


def block_of(part: WeightPart) -> tuple[int, int]:
    """Rows and columns of ``part`` that share a scale."""
    form = part.format
    if form.group == -1:
        return part.rows, part.columns
    return form.group_out, form.group or part.columns


class StoredPacking(Packing):
    """Row-major bytes and float32 scales."""

    layout = LAYOUT

    def __init__(self, device: _Device, arena: Arena | None = None) -> None:
        self._device, self._arena = device, arena

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if isinstance(self._device.native, Unavailable):
            return self._device.native.reason
        if dtype not in DTYPES:
            return f"computes in float32 and bfloat16, not {dtype}"
        stored = [part.format for part in parts if not part.format.plain]
        for form in stored:
            if form.storage not in KINDS:
                return f"reads {', '.join(KINDS)}, not {form.storage}"
            if form.scale not in _SCALES:
                return f"reads scales in {', '.join(_SCALES)}, not {form.scale}"
            if form.zero is not None or form.order != "row" or form.activation is not None:
                return "does not know zero points, orders of columns, or rounded activations"
        return None if stored else "no part has scales"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(self._bytes(part, dtype) for part in parts)

    @staticmethod
    def _bytes(part: WeightPart, dtype: str) -> int:
        if part.format.plain:
            return part.rows * part.columns * int(DTYPE_BYTES[dtype])
        high, wide = block_of(part)
        return part.rows * part.columns + -(-part.rows // high) * -(-part.columns // wide) * _SCALE_BYTES

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        tensors: list[torch.Tensor] = []
        structs: list[Stored] = []
        segments, first = (Segment * len(parts))(), 0
        for segment, part in zip(segments, parts, strict=True):
            segment.first, segment.rows = first, part.rows
            first += part.rows
            wanted = getattr(torch, dtype if part.format.plain else part.format.storage)
            weight = self._copy(part, wanted)
            tensors.append(weight)
            segment.kind, segment.data = 0, weight.data_ptr()
            if part.format.plain:
                continue
            high, wide = block_of(part)
            blocks = -(-part.columns // wide)
            scale = part.tensors["scale"].float().reshape(-(-part.rows // high), blocks).clone()
            tensors.append(scale)
            structs.append(Stored(weight.data_ptr(), scale.data_ptr(), high, wide, blocks))
            segment.kind, segment.data = KINDS[part.format.storage], ctypes.addressof(structs[-1])
        data = BlockData(tuple(tensors), Blocks(len(parts), segments), tuple(structs))
        return PackedWeight(
            self.layout, (first, parts[0].columns), data, sum(t.nbytes for t in tensors), tuple(p.format for p in parts)
        )

    def _copy(self, part: WeightPart, dtype: torch.dtype) -> torch.Tensor:
        stored, shape = part.tensors["weight"], (part.rows, part.columns)
        if tuple(stored.shape) != shape or not (part.format.plain or stored.dtype is dtype):
            raise ValueError(f"{part.name} is {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
        kept = torch.empty(shape, dtype=dtype) if self._arena is None else self._arena.take(shape, dtype)
        return kept.copy_(stored)
