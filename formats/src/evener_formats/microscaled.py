"""Floats of four, six and eight bits in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, 2023), as
compressed-tensors stores them: "mxfp4-pack-quantized", "mxfp6-pack-quantized" and "mxfp8-quantized".

Six bits (E2M3) are kept in eight: each of their values is one of E4M3. Imports torch only to read weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import MXFP4, QuantFormat, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import Along, Axes, BesideScheme
from evener_formats.mxfp4 import Mxfp4Scheme

if TYPE_CHECKING:
    import torch

_GROUP, _NAN = MXFP4.group, 255
_EIGHT = QuantFormat("float8_e4m3fn", group=_GROUP, scale="float8_e8m0fnu")
#: dtype of the stored numbers and how many of them a group has: the bits of a number.
_BITS: Mapping[tuple[str, Fraction | int], int] = {("uint8", 16): 4, ("uint8", 24): 6, (_EIGHT.storage, 32): 8}


class MicroscaledFloats(BesideScheme):
    """``<layer>.weight_packed`` uint8 [rows, columns x bits / 8], or with eight bits ``weight`` float8_e4m3fn [rows,
    columns], and ``weight_scale`` uint8 [rows, columns / 32], exponents with a bias of 127.
    """

    name = "compressed-tensors"

    def detect(self, config: Mapping[str, Any]) -> bool:
        del config
        return False  # CompressedTensors speaks for it

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        packed = f"{name}_packed"
        return {"packed": packed if packed in headers else name, "exponents": f"{name}_scale"}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        (kind, shape), (scale, scales) = (
            headers.get(each, ("nothing", ())) for each in self.tensors(name, headers).values()
        )
        matrix = scale == "uint8" and len(shape) == len(scales) == 2 and shape[0] == scales[0] > 0 < scales[1]
        bits = _BITS.get((kind, Fraction(shape[1], scales[1]))) if matrix else None
        if bits is None:
            raise CheckpointError(
                f"{name} is stored as {kind} {list(shape)} with scales {scale} {list(scales)}; floats with powers of "
                f"two are uint8 [rows, columns / 2] (4 bits) or [rows, columns x 3 / 4] (6 bits), or {_EIGHT.storage} "
                f"[rows, columns], with scales uint8 [rows, columns / {_GROUP}]; fetch the files again"
            )
        return WeightPart(name, shape[0], scales[1] * _GROUP, MXFP4 if bits == 4 else _EIGHT)

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        stored = part.tensors["packed"].shape[1]
        return {
            "packed": Axes(Along(0), Along(1, Fraction(part.columns, stored))),
            "exponents": Axes(Along(0), Along(1, _GROUP)),
        }

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        stored, scale = part.tensors["packed"], part.tensors["exponents"]
        if part.format == MXFP4:
            return replace(part, tensors={"weight": stored.unflatten(1, (-1, _GROUP // 2)), "scale": scale})
        if stored.dtype == torch.uint8:
            low, middle, high = (byte.int() for byte in stored.unflatten(1, (-1, 3)).unbind(-1))
            four = low | middle << 8 | high << 16
            codes = torch.stack([four >> shift & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(1)
            # A sign, two bits of exponent with a bias of 1, three of mantissa.
            eighths = torch.tensor([*range(8), *(8 + m << e for e in range(3) for m in range(8))]) / 8
            stored = torch.cat((eighths, -eighths)).to(torch.float8_e4m3fn)[codes.long()]
        return replace(part, tensors={"weight": stored, "scale": scale.view(torch.float8_e8m0fnu)})

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        if part.format == MXFP4:
            return Mxfp4Scheme().dequantize(self.arrange(part), dtype)
        return super().dequantize(part, dtype)

    def numbers(self, part: WeightPart) -> Iterator[torch.Tensor]:
        import torch

        yield torch.where(part.tensors["exponents"] == _NAN, torch.nan, 1.0)
        if part.tensors["packed"].is_floating_point():
            yield part.tensors["packed"]


def microscaled_examples(
    name: str, random: torch.Generator
) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
    """Examples of the three formats."""
    import torch

    rows, columns = 48, 192
    for form, bits in (("mxfp4-pack-quantized", 4), ("mxfp6-pack-quantized", 6), ("mxfp8-quantized", 8)):
        numbers = torch.randint(0, 256, (rows, columns * bits // 8), generator=random).to(torch.uint8)
        if bits == 8:
            numbers = (torch.randn(rows, columns, generator=random) * 50).to(torch.float8_e4m3fn)
        # Weights stay below one: kernels that round activations are allowed an error for such weights.
        scale = torch.randint(112, 116, (rows, columns // _GROUP), generator=random).to(torch.uint8)
        tensors = {name if bits == 8 else f"{name}_packed": numbers, f"{name}_scale": scale}
        headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
        yield {"quantization_config": {"quant_method": "compressed-tensors", "format": form}}, headers, tensors
