"""The scheme "modelopt" (Model Optimizer), whose layers may each have a format of their own.

The tensors stored beside a name decide how it is read. Layers that ``exclude_modules`` names are stored plain, and are
read so. AWQ and SmoothQuant multiply the activations of some layers by a number for each column,
``<layer>.pre_quant_scale``. ``QuantFormat`` has no such factors, and scales of groups or rows cannot take them up. So a
weight with factors has a format that no packing reads, and is dequantized with them when it is loaded: the product is
the same. Other layers have none, because the tool moved them into the norm before (AWQ), and stay packed. Imports torch
only to read weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import DTYPE_BYTES, QuantFormat, QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.compressed import PartlyPacked
from evener_formats.microscaled import MicroscaledFloats
from evener_formats.packed import PackedFloats, float_example
from evener_formats.rules import malformed, mapping, number
from evener_formats.words import pairs

if TYPE_CHECKING:
    import torch

_FP8 = Rounding("float8_e4m3fn", -1)
_INT8 = Rounding("int8", -1)
#: What ``quant_algo`` says of activations of eight-bit weights. Scales of four axes are those of blocks.
_ALGORITHMS: Mapping[str, Rounding | None] = {
    "FP8": _FP8, "FP8_PER_CHANNEL_PER_TOKEN": Rounding("float8_e4m3fn"), "FP8_PB_WO": None,
    "NVFP4": None, "NVFP4_AWQ": None, "W4A16_NVFP4": None, "MXFP8": None, "MXFP4": None,
    "W4A16_AWQ": None, "W4A8_AWQ": None, "W8A16": None, "W8A8_SQ_PER_CHANNEL": _INT8,
    "MIXED_PRECISION": _FP8, "NONE": _FP8,
}  # fmt: skip
#: Scales of four bits are used in this dtype, the nearest to that of the model in which TensorRT-LLM uses them.
_SCALE = "bfloat16"
_FACTORS, _FACTORED = "pre_quant_scale", " with factors of columns"
#: Elements that are dequantized at a time, so that the float32 copy stays small.
_SLICE = 1 << 22


class RowPairs(BesideScheme):
    """``<layer>.weight`` uint8 [rows / 2, columns], signed numbers of four bits with the even row of a pair in the low
    half of a byte, and ``weight_scale`` [rows, groups]. ``weight_scale_2`` of W4A8_AWQ, with which its kernels round
    weights to FP8 before the product, is not used: a weight is the number times its scale.
    """

    name = "modelopt"

    def detect(self, config: Mapping[str, Any]) -> bool:
        del config
        return False  # ModelOptScheme speaks for it

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        whole = f"{name}_scale_2"
        return {"row_pairs": name, "scale": f"{name}_scale"} | ({"unused_scale": whole} if whole in headers else {})

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        (kind, shape), (scale, scales) = (headers.get(each, ("nothing", ())) for each in (name, f"{name}_scale"))
        rows, columns = (2 * shape[0], shape[1]) if len(shape) == 2 else (0, 0)
        groups = scales[1] if len(scales) == 2 and scales[0] == rows else 0
        group = columns // groups if groups and columns % groups == 0 else 0
        if kind != "uint8" or scale not in PLAIN or rows < 1 or group < 2 or group % 2:
            raise CheckpointError(
                f"{name} is {kind} {list(shape)} with scales {scale} {list(scales)}; integers of four bits are uint8 "
                f"[rows / 2, columns] with scales [rows, groups] in {', '.join(PLAIN)}, and groups have an even number "
                "of columns; fetch the files again"
            )
        # With factors it is dequantized, and no number needs to be rounded.
        exact = scale != "float32" or f"{name.removesuffix('weight')}{_FACTORS}" in headers
        form = QuantFormat("uint4", 0 if group == columns else group, scale=scale if exact else _SCALE, cut=(2, group))
        return WeightPart(name, rows, columns, form)

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        groups = Along(1, part.format.group) if part.format.group else None
        return {"row_pairs": Axes(Along(0, 2), Along(1)), "scale": Axes(Along(0), groups)}

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        # Adding 8 to a signed number of four bits turns over its highest bit.
        stored = part.tensors["row_pairs"] ^ 0x88
        numbers = torch.stack((stored & 15, stored >> 4), dim=1).flatten(0, 1)
        scale = part.tensors["scale"].to(getattr(torch, str(part.format.scale)))
        return replace(part, tensors={"weight": pairs(numbers), "scale": scale.contiguous()})


class ModelOptScheme(PartlyPacked):
    """``"quant_method": "modelopt"``: FP8 with a scale for the tensor, each row or block, NVFP4, MXFP4, MXFP8, int8 by
    row, and integers of four bits in groups.

    Args:
        how: how activations may be rounded before products with weights of eight bits.
    """

    name, methods = "modelopt", ("modelopt", "modelopt_fp4")

    def __init__(self, how: Rounding | None = _FP8) -> None:
        self._how, self._microscaled, self._row_pairs = how, MicroscaledFloats(), RowPairs()
        self._floats = PackedFloats("", "_scale_2", divides=False)

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings = config["quantization_config"]
        inner = settings if settings.get("quantization") is None else mapping(settings, "quantization")
        algorithm = str(inner.get("quant_algo"))
        if algorithm.upper() not in _ALGORITHMS:
            raise CheckpointError(
                f"config.json's quantization_config has the quant_algo {algorithm[:40]!r}; {self.name} reads "
                f"{', '.join(list(_ALGORITHMS)[:-1])}; use such a checkpoint"
            )
        group = number(inner, ("group_size",), 0)
        if group is None or group < 0:
            raise malformed(inner, "group_size", "a number of columns")
        for layer, each in mapping(inner, "quantized_layers").items():
            own = each.get("quant_algo") if isinstance(each, Mapping) else each
            if not isinstance(own, str) or own.upper() not in _ALGORITHMS:
                raise CheckpointError(
                    f"config.json's quantization_config.quantized_layers has {str(own)[:40]!r} for {str(layer)[:80]}; "
                    f"{self.name} reads {', '.join(list(_ALGORITHMS)[:-2])}; use such a checkpoint"
                )
        return ModelOptScheme(_ALGORITHMS[algorithm.upper()])

    def packed(self, name: str, headers: Headers) -> BesideScheme | None:
        stored, scale = (headers.get(each, ("", ()))[0] for each in (name, f"{name}_scale"))
        if scale == "uint8":
            return self._microscaled
        if stored == "uint8" and scale in PLAIN:
            return self._row_pairs
        return self._floats if name in headers and f"{name}_scale_2" in headers else None

    def reader(self, part: WeightPart) -> BesideScheme | None:
        if "exponents" in part.tensors:
            return self._microscaled
        if "row_pairs" in part.tensors:
            return self._row_pairs
        return self._floats if "whole" in part.tensors else None

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        found, factors = super().tensors(name, headers), f"{name.removesuffix('weight')}{_FACTORS}"
        quantized = name.endswith(".weight") and len(found) > 1
        return {**found, "factors": factors} if quantized and factors in headers else found

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        kind, shape = headers.get(f"{name}_scale", ("", ()))
        blocks = len(shape) == 4 and shape[1] == shape[3] == 1
        part = super().part(name, {**headers, f"{name}_scale": (kind, shape[::2])} if blocks else headers)
        factors = self.tensors(name, headers).get("factors")
        if part is None or factors is None:
            return part
        if headers[factors][0] not in PLAIN or headers[factors][1] != (part.columns,) or part.format.stack:
            raise CheckpointError(
                f"{factors} is {headers[factors][0]} {list(headers[factors][1])}; it is one number for each of the "
                f"{part.columns} columns of {name}, in {', '.join(PLAIN)}; fetch the files again"
            )
        return replace(part, format=_factored(part, DTYPE_BYTES[headers[factors][0]]))

    def rounding(self, name: str, form: QuantFormat) -> Rounding | None:
        # Layers of several algorithms may be in one checkpoint.
        return _INT8 if form.storage == "int8" and self._how is not None else self._how

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        bare, factors = _apart(part)
        if factors is None:
            return super().dequantize(bare, dtype)
        out = torch.empty(part.rows, part.columns, dtype=getattr(torch, dtype), device=factors.device)
        unit = part.format.cut_unit(0)
        step = max(1, _SLICE // part.columns // unit) * unit
        for at in range(0, part.rows, step):
            piece = super().cut(bare, "out", at, min(part.rows, at + step))
            out[at : at + step] = super().dequantize(piece, "float32").mul_(factors.float())
        return out

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        bare, factors = _apart(part)
        piece = super().cut(bare, axis, start, stop)
        if factors is None:
            return piece
        tensors = {**piece.tensors, "factors": factors[start:stop] if axis == "in" else factors}
        return replace(piece, format=part.format, tensors=tensors)

    def arrange(self, part: WeightPart) -> WeightPart:
        bare, factors = _apart(part)
        made = super().arrange(bare)
        if factors is None:
            return made
        # Activations are not rounded.
        kept = {role: tensor for role, tensor in made.tensors.items() if role != "activation_scale"}
        return replace(made, format=part.format, tensors={**kept, "factors": factors})

    def numbers(self, part: WeightPart) -> Iterable[torch.Tensor]:
        bare, factors = _apart(part)
        return [*super().numbers(bare), *(() if factors is None else (factors,))]

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random = torch.Generator().manual_seed(seed)
        tensors = float_example(name, "", "_scale_2", random)
        yield self._example("NVFP4", tensors)
        yield self._example("NVFP4_AWQ", {**tensors, **_random_factors(name, 96, random)})
        for _, headers, scaled in list(super().examples(name, seed))[:2]:
            yield self._example("NVFP4", {})[0], headers, scaled
        weight = torch.randn(256, 384, generator=random).to(torch.float8_e4m3fn)
        yield self._example("fp8_pb_wo", {name: weight, f"{name}_scale": torch.full((2, 1, 3, 1), 1 / 64)})
        rows, columns = 48, 192
        for algorithm, group, kind, factored in (
            ("W4A16_AWQ", 64, torch.float32, False), ("W4A16_AWQ", 32, torch.bfloat16, False),
            ("W4A16_AWQ", 64, torch.float32, True), ("W4A8_AWQ", 64, torch.float32, True),
        ):  # fmt: skip
            scale = ((torch.rand(rows, columns // group, generator=random) + 1) / 64).to(kind)
            tensors = {name: torch.randint(0, 256, (rows // 2, columns), generator=random).to(torch.uint8)}
            tensors |= {f"{name}_scale": scale} | (_random_factors(name, columns, random) if factored else {})
            if algorithm == "W4A8_AWQ":
                tensors |= {f"{name}_scale_2": torch.tensor(0.01), f"{name[:-6]}input_scale": torch.tensor(0.1)}
            yield self._example(algorithm, tensors)
        for algorithm, factored in (("W8A16", False), ("W8A8_SQ_PER_CHANNEL", False), ("W8A8_SQ_PER_CHANNEL", True)):
            tensors = {name: torch.randint(-127, 128, (rows, columns), generator=random).to(torch.int8)}
            tensors[f"{name}_scale"] = (torch.rand(rows, generator=random) + 1) / 1024
            tensors |= _random_factors(name, columns, random) if factored else {}
            tensors |= {} if algorithm == "W8A16" else {f"{name[:-6]}input_scale": torch.tensor(0.05)}
            yield self._example(algorithm, tensors)

    def _example(
        self, algorithm: str, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]:
        headers = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        return {"quantization_config": {"quant_method": self.name, "quant_algo": algorithm}}, headers, tensors


def _random_factors(name: str, columns: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    return {f"{name.removesuffix('weight')}{_FACTORS}": (torch.rand(columns, generator=random) / 2 + 0.25).bfloat16()}


def _factored(part: WeightPart, each: float) -> QuantFormat:
    """The format of a part with factors of ``each`` bytes. Half a bit more, because the count is rounded down."""
    form = replace(part.format, activation=None)
    count = part.rows * part.columns
    bits = (8 * (form.nbytes(part.rows, part.columns) + each * part.columns) + 0.5) / count
    return replace(form, storage=form.storage + _FACTORED, bits=bits, cut=(form.cut_unit(0), form.cut_unit(1)))


def _apart(part: WeightPart) -> tuple[WeightPart, torch.Tensor | None]:
    """A part without its factors, and these. Scales get two axes: [rows, columns] for [rows, 1, columns, 1] of blocks,
    and [rows, 1] for [rows]."""
    tensors = {role: tensor for role, tensor in part.tensors.items() if role != "factors"}
    scale = tensors.get("scale")
    if scale is not None and scale.dim() == 4:
        tensors["scale"] = scale[:, 0, :, 0]
    elif scale is not None and scale.dim() == 1 and part.format.group == 0:
        tensors["scale"] = scale[:, None]
    form = replace(part.format, storage=part.format.storage.removesuffix(_FACTORED))
    return replace(part, format=form, tensors=tensors), part.tensors.get("factors")
