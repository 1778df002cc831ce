"""Weights that stay block-quantized as in their files (GGUF, MXFP4), in the layout of this backend's kernels.

Nothing is rounded: each block's quants and scales are kept as they are, in tiles of 16 rows. The parts of a merged
layer may have different block formats, and some may be plain. Activations are rounded to 16-bit integers with one scale
for 32 columns, an error of about 2⁻¹⁶ of the largest of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.quant import BLOCKS, DTYPE_BYTES, MXFP4, PackedWeight, Packing, WeightPart, block_format
from evener_backend_cpu.huge_pages import Arena
from evener_backend_cpu.native_library import DTYPES, Blocks, Matrix, Native, Segment, Stored

LAYOUT = "cpu.blocks"
LANES = 16
#: Bytes of a tile: for 32 columns, and in addition for 256 columns. In the order of ``enum Kind`` in quant_blocks.h.
_TILE_BYTES: dict[str, tuple[int, int]] = {
    "q4_0": (256 + 32, 0), "q4_1": (256 + 64, 0), "q5_0": (320 + 32, 0), "q5_1": (320 + 64, 0), "q8_0": (512 + 32, 0),
    "q2_k": (256 + 64, 64), "q3_k": (256 + 32, 32), "q4_k": (256 + 32, 64), "q5_k": (320 + 32, 64),
    "q6_k": (384 + 32, 32), MXFP4.storage: (256 + 16, 0),
}  # fmt: skip
FORMATS = {**{storage: block_format(storage) for storage in BLOCKS}, MXFP4.storage: MXFP4}
KINDS = {storage: number for number, storage in enumerate(_TILE_BYTES, 1)}


class _Device(Protocol):
    threads: int

    @property
    def native(self) -> Native | Unavailable: ...


@dataclass(frozen=True)
class BlockData:
    """Data of a ``BlockPacking`` or ``StoredPacking`` weight: its tensors, and the C structs that point to them."""

    tensors: tuple[torch.Tensor, ...]
    struct: Blocks
    parts: tuple[Stored, ...] = ()


def addresses(weight: PackedWeight) -> tuple[int | None, int | None]:
    """Addresses of a plain matrix and of the struct of a block-quantized one; one of them is None."""
    if isinstance(weight.data, BlockData):
        return None, ctypes.addressof(weight.data.struct)
    tensor: torch.Tensor = weight.data
    assert tensor.is_contiguous(), "the plain packing returns contiguous weights"
    return tensor.data_ptr(), None


def matrices(weight: PackedWeight) -> ctypes.Array[Matrix]:
    """The matrices of a stack, by index; valid as long as the weight exists."""
    found = (Matrix * weight.shape[0])()
    for index in range(weight.shape[0]):
        one = weight.data[index]
        found[index] = Matrix(*addresses(PackedWeight(weight.layout, weight.shape[1:], one, 0)))
    return found


def tile_bytes(storage: str, columns: int) -> int:
    """Bytes of a tile of 16 rows."""
    unit, head = _TILE_BYTES[storage]
    return -(-(columns // 32 * unit + -(-columns // 256) * head) // 64) * 64


class BlockPacking(Packing):
    """Tiles of 16 rows for block formats; plain parts of the same layer stay plain."""

    layout = LAYOUT

    def __init__(self, device: _Device, arena: Arena | None = None) -> None:
        self._device, self._arena = device, arena

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if isinstance(self._device.native, Unavailable):
            return self._device.native.reason
        if dtype not in DTYPES:
            return f"computes in float32 and bfloat16, not {dtype}"
        packed = [p for p in parts if not p.format.plain]
        for part in packed:
            storage = part.format.storage
            if storage not in KINDS or part.format != FORMATS[storage]:
                return f"does not know the block format {storage}"
            if part.columns % part.format.group:
                return f"{part.columns} columns are not a multiple of the {storage} block size, {part.format.group}"
        return None if packed else "no part is block-quantized"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(self._bytes(p, dtype) for p in parts)

    @staticmethod
    def _bytes(part: WeightPart, dtype: str) -> int:
        if part.format.plain:
            return part.rows * part.columns * int(DTYPE_BYTES[dtype])
        return -(-part.rows // LANES) * tile_bytes(part.format.storage, part.columns)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        tensors = tuple(self._pack_part(part, dtype) for part in parts)
        segments, first = (Segment * len(parts))(), 0
        for segment, part, tensor in zip(segments, parts, tensors, strict=True):
            segment.kind = KINDS.get(part.format.storage, 0)
            segment.first, segment.rows, segment.data = first, part.rows, tensor.data_ptr()
            first += part.rows
        data = BlockData(tensors, Blocks(len(parts), segments))
        return PackedWeight(
            self.layout, (first, parts[0].columns), data, sum(t.nbytes for t in tensors), tuple(p.format for p in parts)
        )

    def _pack_part(self, part: WeightPart, dtype: str) -> torch.Tensor:
        stored = part.tensors["weight"]
        if part.format.plain:
            return stored.to(getattr(torch, dtype)).contiguous()
        native = self._device.native
        assert isinstance(native, Native), "pack is called after supports"
        if part.format == MXFP4:  # each block follows its scale
            stored = torch.cat((part.tensors["scale"][..., None], stored), dim=-1).flatten(1)
        stored = stored.contiguous()
        size = (self._bytes(part, dtype),)
        if part.rows > stored.shape[0] or stored.dtype is not torch.uint8:
            raise ValueError(f"{part.name} is {stored.dtype} {list(stored.shape)}, not uint8 of {part.rows} rows")
        tiles = torch.empty(size, dtype=torch.uint8) if self._arena is None else self._arena.take(size, torch.uint8)
        native.pack(
            KINDS[part.format.storage], stored.data_ptr(), stored.shape[1], part.rows, part.columns, tiles.data_ptr(),
            self._device.threads,
        )  # fmt: skip
        return tiles
