"""Weights of two to eight bits as compressed-tensors packs them: "pack-quantized" integers and "nvfp4-pack-quantized"
floats, and the same floats as ModelOpt stores them. Imports torch only to read weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import NVFP4, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.gptq import Layer, check_groups, integer_format, integer_tensors
from evener_formats.words import least_count, per_word, unpack

if TYPE_CHECKING:
    import torch

_INT32 = "int32"


class OfLayers(BesideScheme):
    """A way in which compressed-tensors stores weights.

    Args:
        layer: how the weight of a layer, by its name, was quantized.
    """

    name = "compressed-tensors"

    def __init__(self, layer: Callable[[str], Layer]) -> None:
        self._layer = layer

    def detect(self, config: Mapping[str, object]) -> bool:
        del config
        return False  # CompressedTensors speaks for it


class PackedIntegers(OfLayers):
    """``<layer>.weight_packed`` int32 [rows, columns x bits / 32], ``weight_scale`` [rows, groups], ``weight_shape``
    int64 [2], and, if asymmetric, ``weight_zero_point`` int32 [rows x bits / 32, groups], packed along the rows;
    ``weight_g_idx`` int32 [columns] in act-order. Numbers and zero points are stored as unsigned.
    """

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        ends = {"scale": "scale", "zero": "zero_point", "g_idx": "g_idx", "shape": "shape"}
        found = {role: f"{name}_{end}" for role, end in ends.items()}
        return {"packed": f"{name}_packed", **{role: each for role, each in found.items() if each in headers}}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        layer, absent = self._layer(name.removesuffix(".weight")), ("nothing", ())
        (kind, words), (scale, scales), zero, index = (
            headers.get(f"{name}_{end}", absent) for end in ("packed", "scale", "zero_point", "g_idx")
        )
        # A stack of matrices has a stack of scales.
        stack = 1 if len(words) == 3 and len(scales) == 3 and words[0] == scales[0] else 0
        words, scales = words[stack:], scales[stack:]
        rows, unit = (words[0], least_count(layer.bits)) if len(words) == 2 else (0, 1)
        exact = per_word(layer.bits) * (words[1] if rows else 0)
        columns = int(exact)
        group = 0 if layer.group >= columns else layer.group
        groups = -(-columns // group) if group else 1
        zeros = absent if layer.symmetric else (_INT32, (-(-rows * layer.bits // 32), groups))
        order = (_INT32, (columns,)) if layer.act_order and group else absent
        whole = group % unit == 0 == columns % (group or unit)
        fits = kind == _INT32 and scale in PLAIN and rows > 0 < columns and whole
        if not fits or scales != (rows, groups) or zero != zeros or (index != order and index != absent):
            raise CheckpointError(
                f"{name}_packed is {kind} {list(words)} with scales {scale} {list(scales)}, zero points {zero[0]} "
                f"{list(zero[1])} and g_idx {index[0]} {list(index[1])}, which are not those of {layer.bits} bits in "
                f"groups of {layer.group or 'whole rows'}, {'symmetric' if layer.symmetric else 'with zero points'}; "
                "use the config.json that was published with these weights"
            )
        if index == absent:
            layer = replace(layer, act_order=False)
        form = integer_format(layer, columns, group, scale)
        cut = (1 if layer.symmetric else unit, lcm(unit, group or 1))
        return WeightPart(name, rows, columns, replace(form, cut=cut, stack=bool(stack)))

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        words, group = per_word(self._layer(part.name.removesuffix(".weight")).bits), part.format.group
        groups = Along(1, group) if group and part.format.order == "row" else None
        return {
            "packed": Axes(Along(0), Along(1, words)), "scale": Axes(Along(0), groups),
            "zero": Axes(Along(0, words), groups), "g_idx": Axes(None, Along(0)),
        }  # fmt: skip

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        layer, stored = self._layer(part.name.removesuffix(".weight")), part.tensors
        if stored["packed"].dim() != 2:
            raise CheckpointError(f"{part.name}_packed is a stack, and the model has one matrix; fetch the files again")
        numbers = unpack(stored["packed"], layer.bits)
        whole = stored["shape"].flatten().tolist() if "shape" in stored else [part.rows, part.columns]
        if len(whole) != 2 or not (part.rows <= whole[0] and part.columns <= whole[1]):
            raise CheckpointError(
                f"{part.name}_shape says {whole[:4]}, and the packed weight has {part.rows} rows of {part.columns}; "
                "fetch the files again"
            )
        if layer.symmetric:
            zeros = torch.full((1, 1), 1 << (layer.bits - 1), dtype=torch.uint8)
        else:
            zeros = unpack(stored["zero"].T.contiguous(), layer.bits).T[: part.rows]
        tensors = integer_tensors(part, layer, numbers, zeros, stored["scale"])
        if "g_idx" in stored:
            check_groups(part, stored["g_idx"])
            if part.format.order == "act":
                tensors["group_index"] = stored["g_idx"]
        return replace(part, tensors=tensors)


class PackedFloats(BesideScheme):
    """Four-bit floats (E2M1) in groups of 16 with float8 scales, and a scale for the whole tensor.

    Args:
        weight, whole: endings of the packed numbers, uint8 [rows, columns / 2], and of the scale for the tensor.
        divides: whether that scale divides the others, instead of multiplying.
    """

    name = "nvfp4"

    def __init__(self, weight: str, whole: str, divides: bool) -> None:
        self._weight, self._whole, self._divides = weight, whole, divides

    def detect(self, config: Mapping[str, object]) -> bool:
        del config
        return False  # CompressedTensors and ModelOptScheme speak for it

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        return {"packed": name + self._weight, "scale": f"{name}_scale", "whole": name + self._whole}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        (kind, shape), (scale, scales), (whole, numbers) = (
            headers.get(each, ("nothing", ())) for each in self.tensors(name, headers).values()
        )
        rows, columns = (shape[0], 2 * shape[1]) if len(shape) == 2 else (0, 0)
        fits = (kind, scale, whole) == ("uint8", NVFP4.scale, "float32") and numbers in ((), (1,)) and rows > 0
        if not fits or not columns or columns % NVFP4.group or scales != (rows, columns // NVFP4.group):
            raise CheckpointError(
                f"{name}{self._weight} is {kind} {list(shape)} with scales {scale} {list(scales)} and {whole} "
                f"{list(numbers)} for the whole; NVFP4 is uint8 [rows, columns / 2], {NVFP4.scale} [rows, columns / "
                f"{NVFP4.group}] and one float32; fetch the files again"
            )
        return WeightPart(name, rows, columns, NVFP4)

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        return {"packed": Axes(Along(0), Along(1, 2)), "scale": Axes(Along(0), Along(1, NVFP4.group))}

    def arrange(self, part: WeightPart) -> WeightPart:
        whole = part.tensors["whole"].reshape(())
        if not bool(whole != 0) or not bool(whole.isfinite()):
            raise CheckpointError(
                f"{part.name}{self._whole} is {float(whole)}, which is no scale; fetch the files again"
            )
        tensors = {
            "weight": part.tensors["packed"], "scale": part.tensors["scale"],
            "factor": 1 / whole if self._divides else whole,
        }  # fmt: skip
        return replace(part, tensors=tensors)


def float_example(name: str, weight: str, whole: str, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tensors of ``PackedFloats``; ``weight``, ``whole``: its endings."""
    import torch

    return {
        name + weight: torch.randint(0, 256, (24, 48), generator=random).to(torch.uint8),
        f"{name}_scale": (torch.rand(24, 6, generator=random) * 400 + 20).to(torch.float8_e4m3fn),
        name + whole: torch.tensor([1500.0 if weight else 1 / 1500]),
    }
