"""Four-bit numbers of a table of 16 (NVFP4's E2M1, and the tables of NF4 and FP4), rearranged for the kernels.

Numbers and scales of NVFP4 stay what they are. Of another table the largest number becomes 1, and scales grow by what
it was; the bfloat16 and the whole numbers that ``table_words`` describes are rounded.
"""

from __future__ import annotations

import torch

from evener.contracts.quant import NVFP4, QuantFormat, WeightPart
from evener_kernels_triton.blocks import TABLE_ROWS, PackedForm, Pieces, fitting_units, low_bits, scale_words

#: Storages whose parts have a table.
TABLES = ("nf4", "fp4")
_LARGEST_GROUP = 256
#: A number of a table that is as large as the largest, as a whole number for products of bytes.
MOST = 8191


def is_table(form: QuantFormat) -> bool:
    """Whether these functions speak for a format."""
    return form == NVFP4 or form.storage in TABLES


def table_form(part: WeightPart) -> PackedForm | str:
    """The form of a part, or why there is none."""
    form, group = part.format, part.format.group
    if part.columns % max(2, group):
        return f"{part.columns} columns are not a multiple of the group size of {form.storage}, {group}"
    if form == NVFP4:
        return PackedForm("e2m1", "e4m3", group, 0, fitting_units(part.columns, "e2m1", group))
    if form != QuantFormat(form.storage, group, scale="float32"):
        return f"reads {form.storage} with scales in float32 of a row's columns in their order"
    if group not in (32, 64, 128) and (group < _LARGEST_GROUP or group % _LARGEST_GROUP):
        return f"reads groups of 32, 64, 128 or a multiple of {_LARGEST_GROUP} columns, not {group}"
    group = min(group, _LARGEST_GROUP)
    return PackedForm("table", "float", group, 0, fitting_units(part.columns, "table", group))


def table_pieces(part: WeightPart, form: PackedForm, first: int, stop: int, device: torch.device) -> Pieces:
    """Rows ``first`` to ``stop`` of a part with tensors.

    Raises:
        ValueError: its tensors do not have the dtype and the shape of its format.
    """
    kind = getattr(torch, str(part.format.scale))
    own = ("factor", (torch.float32, ())) if part.format == NVFP4 else ("table", (torch.float32, (16,)))
    for role, wanted in (
        ("weight", (torch.uint8, (part.rows, part.columns // 2))),
        ("scale", (kind, (part.rows, part.columns // part.format.group))), own,
    ):  # fmt: skip
        tensor = part.tensors.get(role)
        found = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if found != wanted:
            raise ValueError(f"{role} of {part.name} is {found}, not {wanted}")
    data, scale = (part.tensors[role][first:stop].to(device) for role in ("weight", "scale"))
    numbers = torch.stack((data & 15, data >> 4), -1).flatten(1)
    if part.format == NVFP4:
        # Scales have no sign: that of their numbers is turned. Of the eight groups of 128 columns, those of the first
        # halves of the four tiles come first.
        bits = scale.view(torch.uint8)
        numbers = (numbers.unflatten(1, (-1, NVFP4.group)) ^ (bits >> 7 << 3)[..., None]).flatten(1)
        bits = torch.nn.functional.pad(bits & 127, (0, -bits.shape[1] % 8))
        words = scale_words(bits.unflatten(1, (-1, 4, 2)).transpose(2, 3).flatten(1), form)
        factor = part.tensors["factor"].to(device).expand(stop - first, 1)
        return Pieces(low_bits(numbers, form), None, words, factor)
    table = part.tensors["table"].to(device)
    most = table.abs().max()
    most = torch.where(most > 0, most, torch.ones_like(most))
    scale = (scale * most).repeat_interleave(max(1, part.format.group // form.group), 1)
    return Pieces(low_bits(numbers, form), None, scale_words(scale, form), table_words(table / most))


def table_words(table: torch.Tensor) -> torch.Tensor:
    """float32 [16], whose largest size is 1, to int32 [32] as the kernels look numbers up in it.

    16 words are the numbers in float32. Eight have them as whole numbers of 14 bits, ``round(8191 * number) + 8191``,
    in two planes of 7 bits, the upper one first, four bytes a word. Eight have them as bfloat16, the upper bytes of all
    16 numbers, then the lower bytes.
    """
    whole = (table * MOST).round().int() + MOST
    planes = torch.stack((whole >> 7, whole & 127))
    narrow = table.bfloat16().view(torch.int16).int()
    plain = torch.stack((narrow >> 8, narrow)) & 255
    data = torch.cat((planes.flatten(), plain.flatten())).to(torch.uint8)
    words = torch.cat((table.contiguous().view(torch.int32), data.view(torch.int32)))
    assert len(words) == TABLE_ROWS, "a kernel finds the table of a row without a product"
    return words
