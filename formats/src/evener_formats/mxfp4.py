"""The scheme "mxfp4" (OCP Microscaling Formats 1.0, 2023): blocks of 32 four-bit floats with a power-of-two scale.

gpt-oss stores its experts so. Imports torch only to dequantize.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import MXFP4, QuantScheme, WeightPart, plain
from evener.errors import CheckpointError

if TYPE_CHECKING:
    import torch

BLOCK, _BIAS, _NAN = MXFP4.group, 127, 255
#: The 16 values of a float with a sign, two exponent bits and one mantissa bit (E2M1), indexed by its bits.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_DTYPES = ("float32", "float16", "bfloat16")


class Mxfp4Scheme(QuantScheme):
    """A weight is two tensors, ``<name>_blocks`` uint8 [rows, blocks, 16] and ``<name>_scales`` uint8 [rows, blocks],
    both with the experts as a further first axis if there are any. A weight without them is not quantized
    (``modules_to_not_convert`` in the config names the same weights)."""

    name = "mxfp4"

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == self.name

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        roles = self.tensors(name, headers)
        if any(tensor not in headers for tensor in roles.values()):
            return None
        dtype, shape = headers[roles["weight"]]
        if "scale" not in roles:
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name} is stored as {dtype}, which is not a dtype of unquantized weights, and {name}_blocks, "
                    "which an mxfp4 checkpoint has for quantized ones, is missing; fetch the files again"
                )
            rows, columns = shape[-2:] if len(shape) in (2, 3) else (0, 0)
            return WeightPart(name, rows, columns, plain(dtype))
        scales = headers[roles["scale"]]
        if len(shape) not in (3, 4) or {dtype, scales[0]} != {"uint8"} or shape != (*scales[1], BLOCK // 2):
            raise CheckpointError(
                f"{name} is stored in {dtype} {list(shape)} with scales in {scales[0]} {list(scales[1])}, not in uint8 "
                f"[…, rows, blocks, {BLOCK // 2}] and […, rows, blocks]; fetch the files again"
            )
        return WeightPart(name, shape[-3], shape[-2] * BLOCK, replace(MXFP4, stack=len(shape) == 4))

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        if f"{name}_blocks" in headers:
            return {"weight": f"{name}_blocks", "scale": f"{name}_scales"}
        return {"weight": name}

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        wanted, stored = getattr(torch, dtype), part.tensors["weight"]
        if part.format.plain:
            return stored.to(wanted)
        values = torch.tensor(_VALUES, device=stored.device)
        pairs = torch.stack((values[(stored & 15).long()], values[(stored >> 4).long()]), dim=-1)
        powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS).to(stored.device)
        powers[_NAN] = torch.nan
        numbers: torch.Tensor = pairs.flatten(-2) * powers[part.tensors["scale"].long()][..., None]
        return numbers.flatten(-2).to(wanted)

    def numbers(self, part: WeightPart) -> Iterator[torch.Tensor]:
        import torch

        if part.format.plain:
            yield part.tensors["weight"]
        else:
            yield torch.where(part.tensors["scale"] == _NAN, torch.nan, 1.0)

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        extent = part.rows if axis == "out" else part.columns
        if not 0 <= start < stop <= extent:
            raise CheckpointError(f"cannot cut {start}..{stop} out of the {extent} {axis}-features of {part.name}")
        unit = BLOCK if axis == "in" and not part.format.plain else 1
        if start % unit or stop % unit:
            first, last = start // unit * unit, -(-stop // unit) * unit
            raise CheckpointError(
                f"cannot cut {start}..{stop} out of the in-features of {part.name}: they are stored in blocks of "
                f"{unit}, so both ends must be multiples of {unit}, such as {first} and {last}"
            )
        first, count = start // unit, (stop - start) // unit
        tensors = {role: t.narrow(0 if axis == "out" else 1, first, count) for role, t in part.tensors.items()}
        if axis == "out":
            return replace(part, rows=stop - start, tensors=tensors)
        return replace(part, columns=stop - start, tensors=tensors)

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, config = torch.Generator().manual_seed(seed), {"quantization_config": {"quant_method": self.name}}
        blocks = torch.randint(256, (6, 3, BLOCK // 2), generator=random, dtype=torch.uint8)
        scales = torch.randint(_BIAS - 9, _BIAS + 3, (6, 3), generator=random, dtype=torch.uint8)
        headers = {f"{name}_blocks": ("uint8", (6, 3, BLOCK // 2)), f"{name}_scales": ("uint8", (6, 3))}
        yield config, headers, {f"{name}_blocks": blocks, f"{name}_scales": scales}
        yield config, {name: ("bfloat16", (6, 10))}, {name: torch.randn(6, 10, generator=random).bfloat16()}
