"""The scheme "modelslim": weights of eight and four bits as msModelSlim saves them.

``quant_model_description.json`` has the kind of each tensor. A weight is ``<layer>.weight`` int8 [rows, columns] with
``weight_scale`` [rows, 1] or [rows, groups] and ``weight_offset`` in the same shape: element = (q - offset) x scale. In
newer files, numbers of four bits are two in a byte: rows 2i and 2i + 1, or columns if ``W4A16`` has one scale a row;
the even one is in the low half, signed. Weights of the kind ``W8A8`` may have ``deq_scale`` [rows], the product of the
weight's scale and ``input_scale`` [1], instead of ``weight_scale``; where activations are float16 it is an int64 with
the bits of the float32. ``W4A8_DYNAMIC`` of older versions has two scales: ``weight_scale`` [rows, 1] and
``weight_scale_second`` [rows, groups]; both multiply.

Activations may be rounded with a scale for each token where the kind ends in ``_DYNAMIC``, and with the fixed
``input_scale`` where the kind is ``W8A8`` and ``input_offset`` is zero. With another offset they stay as they are:
``Rounding`` has no offsets, as parts of one weight share a scale, the largest, and there is no such rule for offsets.
``quant_bias`` (the bias, and the offset times the sum of a row's numbers) and ``scale_bias`` serve other products than
these and are not used. Imports torch only to read weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantFormat, QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.modelslim_description import BITS, FILE, FLOAT, FLOATS, Description
from evener_formats.words import pairs

if TYPE_CHECKING:
    import torch

METHOD = "modelslim"
#: Tensors beside a weight, by the roles that they have here.
_ENDS: Mapping[str, str] = {
    "scale": "weight_scale", "zero": "weight_offset", "second": "weight_scale_second",
    "second_zero": "weight_offset_second", "deq_scale": "deq_scale", "input_scale": "input_scale",
    "input_offset": "input_offset", "quant_bias": "quant_bias", "scale_bias": "scale_bias",
}  # fmt: skip
_FLOAT8 = "float8_e4m3fn"
_ABSENT: tuple[str, tuple[int, ...]] = ("nothing", ())
#: Scales that packings of four bits read. With others the numbers are kept in eight bits, which costs no accuracy.
_NARROW = ("float16", "bfloat16")
#: Rows of which the bias inside ``quant_bias`` is compared.
_COMPARED = 64


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a weight. ``half``: the axis along which two numbers are in a byte."""

    rows: int
    columns: int
    group: int
    half: Literal[0, 1] | None = None


class ModelSlimScheme(BesideScheme):
    """``"quant_method": "modelslim"``, which the view of such a folder sets: its own ``config.json`` says nothing.

    Args:
        description, checkpoint: of a configured scheme.
    """

    name = METHOD

    def __init__(self, description: Description | None = None, checkpoint: Checkpoint | None = None) -> None:
        self._description = description or Description(FILE, {}, False)
        self._checkpoint, self._shifted, self._fixed = checkpoint, dict[str, bool](), dict[str, bool]()

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        del config
        if checkpoint is None:
            raise CheckpointError(f"{METHOD} needs the checkpoint's {FILE}; open the model's folder")
        return ModelSlimScheme(Description.of(checkpoint), checkpoint)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        stem = name.removesuffix(".weight")
        if name == stem or self._description.kind(name) not in BITS:
            return {"weight": name}
        beside = {role: f"{stem}.{end}" for role, end in _ENDS.items()}
        return {"weight": name, **{role: each for role, each in beside.items() if each in headers}}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if name not in headers:
            return None
        kind, file = self._description.kind(name), self._description.file
        if kind == FLOAT or (kind is None and headers[name][0] in PLAIN):
            return super().part(name, headers)
        if kind is None or kind not in BITS:
            raise CheckpointError(
                f"{name} is of the kind {str(kind)[:40]!r} in {file}; evener reads {', '.join(BITS)} and {FLOAT}; "
                "quantize the original model again in one of them, or give the original model and type quant=int8"
            )
        sizes = self._sizes(name, kind, headers)
        form = self._format(name, kind, headers, sizes)
        # Pairs of packed values must not be split, now or after packing.
        rows = 2 if sizes.half == 0 else 1
        columns = max(1, sizes.group) if form.storage != "uint4" and sizes.half != 1 else max(2, sizes.group)
        return WeightPart(name, sizes.rows, sizes.columns, replace(form, cut=(rows, columns)))

    def _sizes(self, name: str, kind: str, headers: Headers) -> _Sizes:
        """
        Raises:
            CheckpointError: the shapes or dtypes are not those of a weight of this kind.
        """
        roles = self.tensors(name, headers)
        found = {role: headers[roles[role]] if role in roles else _ABSENT for role in ("weight", *_ENDS)}
        (dtype, shape), (scale, scales) = found["weight"], found["scale"]
        static = found["scale"] is _ABSENT
        if static:
            scale, scales = found["deq_scale"]
        number = found["input_scale"]
        fits = dtype == (_FLOAT8 if kind in FLOATS else "int8") and len(shape) == 2 and min(shape) > 0
        fits &= scale in (("float32", "int64") if static else PLAIN) and len(scales) in (1, 2) and min(scales) > 0
        # Scales for the groups of a row.
        parted, second = len(scales) == 2 and scales[1] > 1, found["second"]
        if static:
            fits &= kind == "W8A8" and not parted and number is not _ABSENT
        # One scale and one offset for all activations.
        fits &= number is _ABSENT or (number[0] in PLAIN and number[1] in ((), (1,)))
        fits &= found["zero"] is _ABSENT or (found["zero"][0] in PLAIN and found["zero"][1] == scales)
        if second is not _ABSENT:
            fits &= BITS[kind] == 4 and not parted and second[0] in PLAIN and len(second[1]) == 2
            fits &= second[1][:1] == scales[:1] and found["second_zero"] in (_ABSENT, second)
        by_row = (found[role] for role in ("deq_scale", "quant_bias"))
        fits &= all(each is _ABSENT or each[1][:1] == scales[:1] for each in by_row)
        if fits:
            (height, width), rows = shape, scales[0]
            half: Literal[0, 1] | None = None
            if BITS[kind] == 4 and 2 * height == rows:
                half, height = 0, rows
            elif self._description.packed and kind == "W4A16" and not parted:
                half, width = 1, 2 * width
            groups = second[1][1] if second is not _ABSENT else scales[1] if parted else 1
            if height == rows and 0 < groups <= width and width % groups == 0:
                return _Sizes(rows, width, width // groups if groups > 1 else 0, half)
        beside = ", ".join(f"{_ENDS[r]} {h[0]} {list(h[1])}" for r, h in found.items() if r in _ENDS and h != _ABSENT)
        raise CheckpointError(
            f"{name} is stored as {dtype} {list(shape)} with {beside or 'nothing beside it'}, which are not the "
            f"tensors of {kind}: numbers [rows, columns] with weight_scale and weight_offset [rows, 1] or [rows, "
            "groups]; W8A8 may have deq_scale [rows] and input_scale [1] instead; fetch the files again"
        )

    def _format(self, name: str, kind: str, headers: Headers, sizes: _Sizes) -> QuantFormat:
        roles = self.tensors(name, headers)
        shifted = self._is_shifted(name, roles)
        scale = "float32" if "second" in roles or "scale" not in roles else headers[roles["scale"]][0]
        if kind in FLOATS:
            if shifted:
                raise CheckpointError(
                    f"{roles['zero']} is not zero, and {kind} has no offsets; quantize the original model again"
                )
            return QuantFormat(_FLOAT8, sizes.group, scale=scale, activation=Rounding(_FLOAT8))
        even = sizes.columns % 2 == 0 == sizes.group % 2
        dynamic = Rounding("int8") if kind in ("W8A8_DYNAMIC", "W4A8_DYNAMIC") else None
        if BITS[kind] == 4 and even and (shifted or scale in _NARROW):
            return QuantFormat("uint4", sizes.group, scale=scale, zero="uint8" if shifted else None, activation=dynamic)
        how = None if shifted else Rounding("int8", -1) if self._is_fixed(name, kind, roles) else dynamic
        return QuantFormat("int8", sizes.group, scale=scale, zero="int8" if shifted else None, activation=how)

    def _is_shifted(self, name: str, roles: Mapping[str, str]) -> bool:
        """Whether an offset of a weight is not zero. The tensors are small: one number for a row or a group."""
        if name not in self._shifted:
            given, held = [roles[r] for r in ("zero", "second_zero") if r in roles], self._checkpoint
            found = [each for each in given if held is not None and bool(held.tensor(each).any())]
            if found and ("second" in roles or "scale" not in roles):
                raise CheckpointError(
                    f"{found[0]} is not zero, which is not read for weights with two scales or with deq_scale alone; "
                    "quantize the original model again, symmetric"
                )
            self._shifted[name] = bool(found)
        return self._shifted[name]

    def _is_fixed(self, name: str, kind: str, roles: Mapping[str, str]) -> bool:
        """Whether activations have a fixed scale and an offset of zero. One number is read."""
        if name not in self._fixed:
            held, needed = self._checkpoint, {"input_scale", "input_offset"} <= roles.keys()
            self._fixed[name] = (
                kind == "W8A8" and needed and held is not None and not bool(held.tensor(roles["input_offset"]).any())
            )
        return self._fixed[name]

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        weight, group = part.tensors["weight"], part.format.group

        def beside(role: str) -> Axes:
            tensor = part.tensors[role]
            parted = group > 0 and tensor.dim() == 2 and tensor.shape[1] > 1
            return Axes(Along(0), Along(1, group) if parted else None)

        found = {"weight": Axes(Along(0, _per(part.rows, weight, 0)), Along(1, _per(part.columns, weight, 1)))}
        found |= {r: beside(r) for r in ("scale", "zero", "second", "second_zero") if r in part.tensors}
        return {**found, **dict.fromkeys(("deq_scale", "quant_bias"), Axes(Along(0)))}

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        form, stored = part.format, part.tensors
        if form.plain:
            return part
        self._check_bias(part)
        four = BITS.get(self._description.kind(part.name) or "", 8) == 4
        numbers = _signed(part) if four else stored["weight"]
        scale = self._scale(part)
        tensors = {"weight": numbers, "scale": scale.reshape(part.rows, -1).contiguous()}
        if form.storage == "uint4":
            tensors["weight"] = pairs(numbers.view(torch.uint8) + 8)
        if form.activation == Rounding("int8", -1):
            tensors["activation_scale"] = fixed = stored["input_scale"].float().reshape(())
            if not 0 < float(fixed) < math.inf:
                raise CheckpointError(
                    f"input_scale of {part.name} is {float(fixed):g}, and a scale is more than zero and finite; fetch "
                    "the files again"
                )
        if form.zero:
            tensors["zero"] = _zeros(part, 8 if form.storage == "uint4" else 0, 16 if four else 256)
        return replace(part, tensors=tensors)

    def _scale(self, part: WeightPart) -> torch.Tensor:
        """Scales of a part, for each row or group."""
        import torch

        stored = part.tensors
        if "second" in stored:
            return stored["second"].float() * stored["scale"].float().reshape(part.rows, 1)
        if "scale" in stored:
            return stored["scale"]
        product = stored["deq_scale"]
        if product.dtype == torch.int64:
            if bool((product < 0).any()) or bool((product >= 2**31).any()):
                raise CheckpointError(f"deq_scale of {part.name} has numbers that are no scales; fetch the files again")
            product = product.to(torch.int32).view(torch.float32)
        made = product / stored["input_scale"].float().reshape(())
        if not bool(made.isfinite().all()):
            raise CheckpointError(
                f"deq_scale of {part.name} divided by input_scale is NaN or infinite somewhere; fetch the files again"
            )
        return made

    def _check_bias(self, part: WeightPart) -> None:
        """A bias that is only inside of ``quant_bias`` would be lost. ``quant_bias`` = bias / deq_scale - (sum of the
        row's numbers) x input_offset, rounded. The first rows tell. A rank's piece of the columns is not compared.

        Raises:
            CheckpointError: there is one.
        """
        stored, held, bias = part.tensors, self._checkpoint, f"{part.name.removesuffix('weight')}bias"
        if not {"quant_bias", "input_offset"} <= stored.keys() or held is None or bias in held.headers:
            return
        if held.headers[part.name][1][1] != part.columns or held.text("evener_split.json") is not None:
            return
        rows = slice(0, _COMPARED)
        shift = stored["weight"][rows].double().sum(1) * stored["input_offset"].double().reshape(())
        left = (stored["quant_bias"][rows].double() + shift).abs()
        if bool((left > 2 + 1e-5 * shift.abs()).any()):
            raise CheckpointError(
                f"quant_bias of {part.name} contains a bias, and the checkpoint has no {bias}; use the tensors of a "
                "newer version of ModelSlim, which stores it"
            )

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        from evener_formats.modelslim_examples import examples

        yield from examples(name, seed)


def _per(extent: int, weight: torch.Tensor, axis: int) -> int:
    """Numbers in a byte along an axis."""
    return 2 if extent == 2 * weight.shape[axis] else 1


def _signed(part: WeightPart) -> torch.Tensor:
    """The numbers of four bits of a part, int8 [rows, columns], from -8 to 7."""
    import torch

    weight = part.tensors["weight"]
    if tuple(weight.shape) == (part.rows, part.columns):
        if weight.numel() and (int(weight.min()) < -8 or int(weight.max()) > 7):
            raise CheckpointError(
                f"{part.name} has numbers from {int(weight.min())} to {int(weight.max())}, which do not fit four bits "
                "(-8 to 7); fetch the files again"
            )
        return weight
    both = (weight << 4 >> 4, weight >> 4)
    return torch.stack(both, 1).flatten(0, 1) if weight.shape[1] == part.columns else torch.stack(both, -1).flatten(-2)


def _zeros(part: WeightPart, middle: int, count: int) -> torch.Tensor:
    """The offsets of a part, plus ``middle``, as the numbers of its format: int8, or uint8."""
    import torch

    offset = part.tensors["zero"].float().reshape(part.rows, -1)
    low = -(count // 2)
    if bool((offset != offset.round()).any()) or float(offset.min()) < low or float(offset.max()) > low + count - 1:
        raise CheckpointError(
            f"weight_offset of {part.name} has numbers from {float(offset.min()):g} to {float(offset.max()):g}; read "
            f"are whole numbers from {low} to {low + count - 1}; quantize the original model again, symmetric"
        )
    return (offset + middle).to(torch.int8 if part.format.storage == "int8" else torch.uint8)
