"""Integers of four and eight bits in groups (``uint4``, ``int8``) as blocks of 32 columns, which ``BlockPacking`` puts
into tiles. No number changes: a block repeats the scale and the zero point of its group. Columns in act-order are
sorted by group, and each group is filled up to whole blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from evener.contracts.quant import WeightPart

UNIT = 32
_ZEROS = {"uint4": "uint8", "int8": "int8"}


class GroupedBlocks(NamedTuple):
    """Blocks of one part.

    Attributes:
        tile: a key of ``_TILE_BYTES``.
        blocks: uint8 [rows, bytes].
        order: int32 [columns of the blocks]: a column of the part, or -1 for zeros; None: the part's own order.
    """

    tile: str
    blocks: torch.Tensor
    order: torch.Tensor | None


def is_grouped(part: WeightPart) -> bool:
    """Whether this module is asked about a part: ``uint4``, and ``int8`` with zero points or in act-order."""
    form = part.format
    return form.storage == "uint4" or (form.storage == "int8" and (form.zero is not None or form.order != "row"))


def refusal(part: WeightPart) -> str | None:
    """Why a part that ``is_grouped`` cannot be packed."""
    form = part.format
    if form.scale not in ("float16", "bfloat16"):
        return f"reads integers in groups with scales in float16 or bfloat16, not {form.scale}"
    if form.group < 0 or form.group % UNIT or form.group_out != 1:
        return f"reads groups of a multiple of {UNIT} columns or whole rows, not {form.group} x {form.group_out} rows"
    if form.order == "act" and not form.group:
        return "reads act-order in groups of columns, not in whole rows"
    if part.columns % UNIT:
        return f"{part.columns} columns are not a multiple of {UNIT}"
    if form.order not in ("row", "act") or form.zero not in (None, _ZEROS[form.storage]):
        return "does not know these zero points, or this order of columns"
    return None


def tile_of(part: WeightPart) -> str:
    """The tile that a part is packed in."""
    form = part.format
    if form.zero is None and form.scale == "float16":
        return "q4_0" if form.storage == "uint4" else "q8_0"
    return f"{form.storage} {form.scale}"


def most_columns(part: WeightPart) -> int:
    """Columns of the blocks at most: those of a rank's piece in act-order depend on the groups of its columns."""
    form = part.format
    groups = form.row_scales(part.columns)
    if form.order != "act" or groups == -(-part.columns // form.group):
        return part.columns
    most = part.columns + (UNIT - 1) * min(groups, part.columns)
    return most // UNIT * UNIT


def blocks_of(part: WeightPart) -> GroupedBlocks:
    """The blocks of a part with its tensors."""
    form, rows = part.format, part.rows
    stored, scale, zero = part.tensors["weight"], part.tensors["scale"], part.tensors.get("zero")
    numbers = torch.stack((stored & 15, stored >> 4), -1).flatten(1) if form.storage == "uint4" else stored
    if numbers.shape != (rows, part.columns):
        raise ValueError(f"{part.name} has {list(numbers.shape)} numbers, not {[rows, part.columns]}")
    order = None
    if form.order == "act":
        order, group = _sorted_columns(part.tensors["group_index"].long(), form.row_scales(part.columns))
        numbers = numbers[:, order.clamp(min=0)]
    else:
        group = torch.arange(0, part.columns, UNIT) // (form.group or part.columns)
    units, tile = numbers.unflatten(1, (-1, UNIT)), tile_of(part)
    head = [scale[:, group, None].contiguous().view(torch.uint8)]
    if tile == "q4_0":  # ggml's: number i beside number i + 16
        data = units[..., :16] | units[..., 16:] << 4
    else:
        if tile != "q8_0":
            middle = torch.full((rows, len(group)), 8 if form.storage == "uint4" else 0, dtype=torch.uint8)
            head.append((middle if zero is None else zero[:, group].view(torch.uint8))[..., None])
        four = form.storage == "uint4"
        data = units[..., ::2] | units[..., 1::2] << 4 if four else units.contiguous().view(torch.uint8)
    blocks = torch.cat((*head, data), dim=-1).flatten(1)
    return GroupedBlocks(tile, blocks, None if order is None else order.to(torch.int32))


def _sorted_columns(index: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns sorted by their group, each group filled up to whole blocks with -1; and the group of each block."""
    counts = torch.bincount(index, minlength=groups)
    room = -(-counts // UNIT) * UNIT
    starts, first = room.cumsum(0) - room, counts.cumsum(0) - counts
    by_group = index.argsort(stable=True)
    of = index[by_group]
    order = torch.full((int(room.sum()),), -1, dtype=torch.int64)
    order[starts[of] + torch.arange(len(index)) - first[of]] = by_group
    return order, torch.arange(groups).repeat_interleave(room // UNIT)
