"""Weights that stay quantized as in their files, in the layout of this backend's kernels: blocks of GGUF and MXFP4,
integers in groups, and numbers of a table.

Nothing is rounded: each block's quants and scales are kept as they are, in tiles of 16 rows. The parts of a merged
layer may have different block formats, and some may be plain. Activations are rounded to 16-bit integers with one scale
for 32 columns, an error of about 2⁻¹⁶ of the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.quant import BLOCKS, MXFP4, WeightPart, block_format
from evener_backend_cpu import grouped_packing, table_packing
from evener_backend_cpu.file_pages import strips
from evener_backend_cpu.native_library import Native, Ordered
from evener_backend_cpu.segments import MISSING, PackedPart, SegmentPacking

LAYOUT = "cpu.blocks"
LANES = 16
#: Bytes of a tile: for 32 columns, and in addition for 256 columns. In the order of ``enum Kind`` in quant_blocks.h.
_TILE_BYTES: dict[str, tuple[int, int]] = {
    "q4_0": (256 + 32, 0), "q4_1": (256 + 64, 0), "q5_0": (320 + 32, 0), "q5_1": (320 + 64, 0), "q8_0": (512 + 32, 0),
    "q2_k": (256 + 64, 64), "q3_k": (256 + 32, 32), "q4_k": (256 + 32, 64), "q5_k": (320 + 32, 64),
    "q6_k": (384 + 32, 32), MXFP4.storage: (256 + 16, 0),
    "uint4 float16": (256 + 48, 0), "uint4 bfloat16": (256 + 48, 0), "int8 float16": (512 + 48, 0),
    "int8 bfloat16": (512 + 48, 0), "float4 float8": (256 + 32, 64), "table": (256, 320),
}  # fmt: skip
FORMATS = {**{storage: block_format(storage) for storage in BLOCKS}, MXFP4.storage: MXFP4}
#: Bytes of a column's place in another order.
_ORDER_BYTES = 4
#: ``ORDERED`` of quant_gemm.h: columns in another order.
_ORDERED = 128
KINDS = {storage: number for number, storage in enumerate(_TILE_BYTES, 1)}


def tile_bytes(storage: str, columns: int) -> int:
    """Bytes of a tile of 16 rows."""
    unit, head = _TILE_BYTES[storage]
    return -(-(columns // 32 * unit + -(-columns // 256) * head) // 64) * 64


def _tile_of(part: WeightPart) -> str:
    """The tile of a part that is not in groups."""
    return table_packing.tile_of(part) if table_packing.is_table(part) else part.format.storage


class BlockPacking(SegmentPacking):
    """Tiles of 16 rows for block formats."""

    layout = LAYOUT

    def _refusal(self, part: WeightPart) -> str | None:
        storage = part.format.storage
        if grouped_packing.is_grouped(part):
            return grouped_packing.refusal(part)
        if table_packing.is_table(part):
            return table_packing.refusal(part)
        if storage not in FORMATS or part.format != FORMATS[storage]:
            return f"does not know the block format {storage}"
        if part.columns % part.format.group:
            return f"{part.columns} columns are not a multiple of the {storage} block size, {part.format.group}"
        return None

    def _quantized_bytes(self, part: WeightPart) -> int:
        tiles = -(-part.rows // LANES)
        if not grouped_packing.is_grouped(part):
            return tiles * tile_bytes(_tile_of(part), part.columns)
        columns = grouped_packing.most_columns(part)
        order = _ORDER_BYTES * (columns + 1) if part.format.order == "act" else 0
        return tiles * tile_bytes(grouped_packing.tile_of(part), columns) + order

    def _pack_part(self, part: WeightPart) -> PackedPart:
        if grouped_packing.is_grouped(part):
            return self._pack_grouped(part)
        if table_packing.is_table(part):
            return self._pack_table(part)
        stored, storage = part.tensors["weight"], part.format.storage
        if part.format == MXFP4:  # each block follows its scale
            stored = torch.cat((part.tensors["scale"][..., None], stored), dim=-1).flatten(1)
        stored = stored.contiguous()
        if part.rows > stored.shape[0] or stored.dtype is not torch.uint8:
            raise ValueError(f"{part.name} is {stored.dtype} {list(stored.shape)}, not uint8 of {part.rows} rows")
        tiles = self._room((self._quantized_bytes(part),), torch.uint8)
        self._write(storage, stored, part.columns, tiles)
        return PackedPart(KINDS[storage], (tiles,))

    def _pack_grouped(self, part: WeightPart) -> PackedPart:
        tile, blocks, order = grouped_packing.blocks_of(part)
        room = self._room((self._quantized_bytes(part),), torch.uint8)
        if order is None:
            self._write(tile, blocks, part.columns, room)
            return PackedPart(KINDS[tile], (room,))
        # The tiles' size depends on the columns that there are. The order, and their number, lie behind the room for
        # the most.
        self._write(tile, blocks, len(order), room)
        behind = room[-_ORDER_BYTES * (grouped_packing.most_columns(part) + 1) :].view(torch.int32)
        behind[: len(order)], behind[-1] = order, len(order)
        return self._ordered(part, room)

    def _pack_table(self, part: WeightPart) -> PackedPart:
        tile = table_packing.tile_of(part)
        room, (unit, head) = self._room((self._quantized_bytes(part),), torch.uint8), _TILE_BYTES[tile]
        self._write(tile, table_packing.blocks_of(part), part.columns, room)
        table_packing.write_heads(part, room, head, 8 * unit + head)
        return PackedPart(KINDS[tile], (room,))

    def _ordered(self, part: WeightPart, room: torch.Tensor) -> PackedPart:
        """A part in act-order, whose tiles, order and number of columns are in ``room``."""
        most = grouped_packing.most_columns(part)
        behind = room[-_ORDER_BYTES * (most + 1) :].view(torch.int32)
        columns, order = int(behind[-1]), behind[:-1]
        inside = bool((order[:columns] < part.columns).all())
        if not 0 <= columns <= most or columns % grouped_packing.UNIT or not inside:
            raise ValueError(f"{part.name} has another number of columns than its order")
        struct = Ordered(room.data_ptr(), order.data_ptr(), columns, KINDS[grouped_packing.tile_of(part)])
        return PackedPart(_ORDERED, (room,), struct)

    def _restored_part(self, part: WeightPart, tensors: Iterator[torch.Tensor]) -> PackedPart:
        room = self._kept(next(tensors, MISSING), (self._quantized_bytes(part),), torch.uint8)
        if not grouped_packing.is_grouped(part):
            return PackedPart(KINDS[_tile_of(part)], (room,))
        if part.format.order == "act":
            return self._ordered(part, room)
        return PackedPart(KINDS[grouped_packing.tile_of(part)], (room,))

    def _write(self, storage: str, blocks: torch.Tensor, columns: int, tiles: torch.Tensor) -> None:
        native = self._device.native
        assert isinstance(native, Native), "pack is called after supports"
        size, row_bytes, to = tile_bytes(storage, columns), blocks.shape[1], tiles.data_ptr()
        for rows in strips(blocks, LANES):
            native.pack(KINDS[storage], rows.data_ptr(), row_bytes, len(rows), columns, to, self._device.threads)
            to += len(rows) // LANES * size
