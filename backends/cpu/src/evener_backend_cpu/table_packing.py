"""Four-bit numbers of a table: NVFP4 (E2M1 floats in groups of 16), and NF4 and FP4 of bitsandbytes (16 numbers in
float32, groups of 64 or more). ``BlockPacking`` puts them into tiles. No number changes.

What 256 columns share lies in front of their tiles: the float32 factor of NVFP4, or the table and the scales. It takes
an eighth of a bit a weight more than the file.
"""

from __future__ import annotations

import torch

from evener.contracts.quant import NVFP4, WeightPart

UNIT, SPAN, LANES = 32, 256, 16
#: Columns with one scale, in front of the tiles of a table.
_SCALED = 64
_TABLES = ("nf4", "fp4")


def is_table(part: WeightPart) -> bool:
    """Whether this module is asked about a part."""
    return part.format == NVFP4 or part.format.storage in _TABLES


def refusal(part: WeightPart) -> str | None:
    """Why a part that ``is_table`` cannot be packed."""
    form = part.format
    if part.columns % UNIT:
        return f"{part.columns} columns are not a multiple of {UNIT}"
    if form == NVFP4:
        return None
    if form.scale != "float32" or (form.zero, form.order, form.group_out, form.activation) != (None, "row", 1, None):
        return f"reads {form.storage} with scales in float32, without zero points or an order of columns"
    if form.group < _SCALED or form.group % _SCALED:
        return f"reads {form.storage} in groups of a multiple of {_SCALED} columns, not {form.group}"
    return None


def tile_of(part: WeightPart) -> str:
    """The tile that a part is packed in."""
    return "float4 float8" if part.format == NVFP4 else "table"


def blocks_of(part: WeightPart) -> torch.Tensor:
    """The numbers of a part with its tensors, and scales of eight bits: uint8 [rows, bytes], in blocks of 32 columns.

    Raises:
        ValueError: its tensors are not those of its format.
    """
    stored, scale, groups = part.tensors["weight"], part.tensors["scale"], part.format.row_scales(part.columns)
    wanted = (part.rows, part.columns // 2), (part.rows, groups)
    kinds = torch.uint8, getattr(torch, str(part.format.scale))
    if (tuple(stored.shape), tuple(scale.shape)) != wanted or (stored.dtype, scale.dtype) != kinds:
        raise ValueError(
            f"{part.name} is {stored.dtype} {list(stored.shape)} with scales {scale.dtype} {list(scale.shape)}, not "
            f"those of {part.rows} rows of {part.columns}"
        )
    if part.format != NVFP4:
        return stored.contiguous()
    units = stored.unflatten(1, (-1, UNIT // 2))
    return torch.cat((scale.contiguous().view(torch.uint8).unflatten(1, (-1, 2)), units), dim=-1).flatten(1)


def write_heads(part: WeightPart, tiles: torch.Tensor, head_bytes: int, span_bytes: int) -> None:
    """Put what columns share in front of them.

    Args:
        tiles: uint8, the tiles of all rows of a part with its tensors; in place.
        head_bytes: in front of each 256 columns.
        span_bytes: from one such place to the next.
    """
    each = tiles.view(-(-part.rows // LANES), -1)
    for number, first in enumerate(range(0, part.columns, SPAN)):
        at = number * span_bytes
        each[:, at : at + head_bytes] = _head(part, first).view(torch.uint8).view(len(each), -1)


def _head(part: WeightPart, first: int) -> torch.Tensor:
    """float32 [tiles, numbers] of 256 columns. Rows and columns that are not there have zeros."""
    tiles = -(-part.rows // LANES)
    if part.format == NVFP4:  # the kernel's table has twice the numbers
        lanes = torch.zeros(tiles * LANES)
        lanes[: part.rows] = part.tensors["factor"].float() / 2
        return lanes.view(tiles, LANES)
    last = min(first + SPAN, part.columns)
    groups = torch.arange(first, last, _SCALED) // part.format.group
    lanes = torch.zeros(SPAN // _SCALED, tiles * LANES)
    lanes[: len(groups), : part.rows] = part.tensors["scale"][:, groups].T
    scales = lanes.view(-1, tiles, LANES).transpose(0, 1).reshape(tiles, -1)
    table = part.tensors["table"].float().reshape(1, LANES).expand(tiles, -1)
    return torch.cat((table, scales), dim=1)
