"""Integers of two to eight bits in groups that are stored one in a byte: "int-quantized" of compressed-tensors, as
llm-compressor saves its schemes W4A8 and W4AFP8. Imports torch only to read weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes
from evener_formats.gptq import integer_format, integer_tensors
from evener_formats.packed import OfLayers

_INT8 = "int8"


class UnpackedIntegers(OfLayers):
    """``<layer>.weight`` int8 [rows, columns], ``weight_scale`` [rows, groups], and, if asymmetric,
    ``weight_zero_point`` int8 [rows, groups]. Numbers and zero points are stored as signed.
    """

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        zero = f"{name}_zero_point"
        return {"numbers": name, "scale": f"{name}_scale"} | ({"zero": zero} if zero in headers else {})

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        layer, absent = self._layer(name.removesuffix(".weight")), ("nothing", ())
        (kind, shape), (scale, scales), zero = (
            headers.get(name + end, absent) for end in ("", "_scale", "_zero_point")
        )
        rows, columns = shape if len(shape) == 2 else (0, 0)
        group = 0 if layer.group >= columns else layer.group
        groups = columns // group if group else 1
        even = layer.bits > 4 or columns % 2 == 0 == group % 2
        fits = kind == _INT8 and scale in PLAIN and rows > 0 < columns and columns % (group or 1) == 0 and even
        zeros = absent if layer.symmetric else (_INT8, (rows, groups))
        if not fits or scales != (rows, groups) or zero != zeros or (layer.act_order and group):
            raise CheckpointError(
                f"{name} is {kind} {list(shape)} with scales {scale} {list(scales)} and zero points {zero[0]} "
                f"{list(zero[1])}, which are not those of {layer.bits} bits in groups of "
                f"{layer.group or 'whole rows'}, {'symmetric' if layer.symmetric else 'with zero points'}, "
                f"{'in act-order' if layer.act_order else 'in the order of the columns'}; supported are int8 [rows, "
                "columns] and scales [rows, groups], not in act-order; use the config.json that was published with "
                "these weights"
            )
        # Two numbers of up to four bits are in a byte once they are arranged.
        cut = (1, group or (2 if layer.bits <= 4 else 1))
        return WeightPart(name, rows, columns, replace(integer_format(layer, columns, group, scale), cut=cut))

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        group = part.format.group
        beside = Axes(Along(0), Along(1, group) if group else None)
        return {"numbers": Axes(Along(0), Along(1)), "scale": beside, "zero": beside}

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        layer, stored = self._layer(part.name.removesuffix(".weight")), part.tensors
        middle = 1 << (layer.bits - 1)

        def unsigned(role: str, what: str) -> torch.Tensor:
            numbers = stored[role]
            if layer.bits < 8 and numbers.numel():
                least, most = int(numbers.min()), int(numbers.max())
                if least < -middle or most >= middle:
                    raise CheckpointError(
                        f"{part.name}{what} has numbers from {least} to {most}, which do not fit in {layer.bits} bits "
                        f"({-middle} to {middle - 1}); fetch the files again"
                    )
            return (numbers.to(torch.int16) + middle).to(torch.uint8)

        zeros = torch.full((1, 1), middle, dtype=torch.uint8) if layer.symmetric else unsigned("zero", "_zero_point")
        return replace(part, tensors=integer_tensors(part, layer, unsigned("numbers", ""), zeros, stored["scale"]))
