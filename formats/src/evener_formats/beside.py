"""What schemes share whose weights are several tensors in a layout of the checkpoint's own: cutting the tensors along
both axes, and the numbers of the formats that they are arranged in (``evener.contracts.storage``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import QuantScheme, WeightPart, plain
from evener.errors import CheckpointError

if TYPE_CHECKING:
    import torch

PLAIN = ("float32", "float16", "bfloat16")
#: Elements that are dequantized at a time, so that the float32 copy stays small.
_SLICE = 1 << 22


class Along(NamedTuple):
    """How an axis of a weight lies in a stored tensor: the tensor's axis, and features for each index there. A word of
    32 bits holds 32/3 numbers of 3 bits."""

    axis: int
    features: Fraction | int = 1


class Axes(NamedTuple):
    """Where a stored tensor has the out-features (``rows``) and the in-features (``columns``) of its weight; None: it
    is the same for all of them."""

    rows: Along | None = None
    columns: Along | None = None


class BesideScheme(QuantScheme):
    """A weight is one plain tensor, or several that ``part`` of the subclass recognizes."""

    @abstractmethod
    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        """The axes of each role of a part that is not plain; a role that is absent is kept whole."""

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if name not in headers:
            return None
        dtype, shape = headers[name]
        if dtype not in PLAIN:
            raise CheckpointError(
                f"{name} is stored as {dtype}, which is no dtype of unquantized weights, and what a quantized weight "
                f"of {self.name} consists of is missing beside it; fetch the files again"
            )
        rows, columns = shape[-2:] if len(shape) in (2, 3) else (0, 0)
        return WeightPart(name, rows, columns, plain(dtype))

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        wanted = getattr(torch, dtype)
        if part.format.plain:
            return part.tensors["weight"].to(wanted)
        part = self.arrange(part)
        out = torch.empty(part.rows, part.columns, dtype=wanted, device=part.tensors["weight"].device)
        step = max(1, _SLICE // max(1, part.columns))
        for at in range(0, part.rows, step):
            tensors = {r: t[at : at + step] if r in _BY_ROW else t for r, t in part.tensors.items()}
            out[at : at + step] = values(replace(part, rows=len(tensors["weight"]), tensors=tensors))
        return out

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        number = 0 if axis == "out" else 1
        extent, unit = (part.rows, part.columns)[number], part.format.cut_unit(number)
        if not 0 <= start < stop <= extent:
            raise CheckpointError(f"cannot cut {start}..{stop} out of the {extent} {axis}-features of {part.name}")
        if start % unit or (stop % unit and stop != extent):
            first, last = start // unit * unit, min(extent, -(-stop // unit) * unit)
            raise CheckpointError(
                f"cannot cut {start}..{stop} out of the {axis}-features of {part.name}: they are stored in groups of "
                f"{unit}, so both ends must be multiples of {unit}, such as {first} and {last}"
            )
        where = {"weight": Axes(Along(0), Along(1))} if part.format.plain else self.axes(part)
        tensors = {}
        for role, tensor in part.tensors.items():
            along = where.get(role, Axes())[number]
            if along is not None:
                first, last = int(start / Fraction(along.features)), -int(-stop // Fraction(along.features))
                tensor = tensor.narrow(along.axis, first, last - first)
            tensors[role] = tensor
        if axis == "out":
            return replace(part, rows=stop - start, tensors=tensors)
        return replace(part, columns=stop - start, tensors=tensors)


#: Roles whose first axis is the rows.
_BY_ROW = ("weight", "scale", "zero")


def values(part: WeightPart) -> torch.Tensor:
    """The float32 numbers of a part in one of the formats uint4, int8, float8, NVFP4, nf4 and fp4, arranged."""
    import torch

    form, tensors = part.format, part.tensors
    stored, scale = tensors["weight"], tensors["scale"].float()
    if stored.dtype == torch.uint8:
        stored = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)
    if form.storage == "float4_e2m1":
        half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=stored.device)
        numbers, scale = torch.cat((half, -half))[stored.long()], scale * tensors["factor"]
    elif "table" in tensors:
        numbers = tensors["table"][stored.long()]
    else:
        numbers = stored.float()
    zero: torch.Tensor | float = 8.0 if form.storage == "uint4" else 0.0
    if form.order == "act":
        group = tensors["group_index"].long()
        scale, zero = scale[:, group], tensors["zero"].float()[:, group] if form.zero else zero
    else:
        scale = _spread(scale, form.group, part.columns)
        zero = _spread(tensors["zero"].float(), form.group, part.columns) if form.zero else zero
    return (numbers - zero) * scale


def _spread(scale: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(group, 1)[:, :columns] if group > 0 else scale
