"""Integers of four or eight bits in groups that share a scale (GPTQ, AWQ, compressed-tensors), rearranged for the
kernels."""

from __future__ import annotations

import torch

from evener.contracts.quant import QuantFormat, WeightPart
from evener_kernels_triton.blocks import PackedForm, Pieces, fitting_units, low_bits, scale_words

#: The storages of these formats, and what the kernels call them; ``evener.contracts.storage`` says what tensors they
#: have.
GROUPED = {"uint4": "q4", "int8": "q8"}
_GROUPS = (32, 64, 128, 256)
#: The dtype of zero points, and without them the number that stands for zero.
_ZEROS = {"uint4": ("uint8", 8), "int8": ("int8", 0)}


def is_grouped(form: QuantFormat) -> bool:
    """Whether these functions speak for a format. Bytes without zero points, in the order of the columns, are read as
    they are stored (``stored``)."""
    return form.storage in GROUPED and (form.storage != "int8" or form.zero is not None or form.order != "row")


def group_form(part: WeightPart) -> PackedForm | str:
    """The form of a part, or why there is none."""
    form = part.format
    kind, (zeros, middle) = GROUPED[form.storage], _ZEROS[form.storage]
    if form.group_out != 1:
        return "does not know scales of several rows"
    if form.order not in ("row", "act") or (form.groups and form.groups != -(-part.columns // max(1, form.group))):
        return "reads columns in the order of their groups, or whole groups in act-order"
    if form.zero not in (None, zeros):
        return f"reads zero points in {zeros}, not {form.zero}"
    if form.scale not in ("float16", "bfloat16"):
        return f"reads scales in float16 and bfloat16, not {form.scale}"
    if form.group not in (0, *_GROUPS):
        return f"reads groups of {', '.join(map(str, _GROUPS))} columns or whole rows, not {form.group}"
    if form.group == 0 and form.order == "act":
        return "has no act-order of whole rows"
    group = form.group or max(_GROUPS)
    style, zero = ("zero", 0) if form.zero else ("half", middle)
    return PackedForm(kind, style, group, zero, fitting_units(part.columns, kind, group), form.scale == "bfloat16")


def sorted_columns(part: WeightPart) -> torch.Tensor:
    """The columns of a part with act-order, group by group; int64 [columns]."""
    return torch.argsort(part.tensors["group_index"], stable=True)


def group_pieces(part: WeightPart, form: PackedForm, first: int, stop: int, device: torch.device) -> Pieces:
    """Rows ``first`` to ``stop`` of a part with tensors.

    Raises:
        ValueError: its tensors do not have the dtype and the shape of its format.
    """
    stored, scale, zero = (part.tensors.get(role) for role in ("weight", "scale", "zero"))
    groups, columns = part.format.row_scales(part.columns), part.columns
    four, (zeros, _) = part.format.storage == "uint4", _ZEROS[part.format.storage]
    for role, tensor, wanted in (
        ("weight", stored, (torch.uint8, (part.rows, columns // 2)) if four else (torch.int8, (part.rows, columns))),
        ("scale", scale, (getattr(torch, str(part.format.scale)), (part.rows, groups))),
        ("zero", zero, (getattr(torch, zeros), (part.rows, groups)) if part.format.zero else None),
    ):
        found = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if wanted is not None and found != wanted:
            raise ValueError(f"{role} of {part.name} is {found}, not {wanted}")
    assert stored is not None and scale is not None, "checked above"
    data = stored[first:stop].to(device)
    numbers = torch.stack((data & 15, data >> 4), -1).flatten(1) if four else data.view(torch.uint8)
    if part.format.order == "act":
        numbers = numbers[:, sorted_columns(part).to(device)]
    scales = scale[first:stop].to(device)
    if part.format.group == 0:
        scales = scales.expand(-1, -(-columns // form.group))
    if zero is None or not part.format.zero:
        return Pieces(low_bits(numbers, form), None, scale_words(scales, form), None)
    middles = zero[first:stop].to(device).to(torch.int16).expand_as(scales)
    both = torch.stack((scales.contiguous().view(torch.int16), middles), -1)
    return Pieces(low_bits(numbers, form), None, scale_words(both, form), None)
