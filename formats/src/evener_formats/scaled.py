"""Weights of eight bits with scales beside them: the scheme "fp8", and a part of what "compressed-tensors" and
"modelopt" read.

They store a float8 or int8 matrix ``<name>``, and the scales as ``<name>_scale_inv`` (DeepSeek V3, Qwen 3 FP8, Kimi K2:
one for each block of 128 × 128) or ``<name>_scale`` (one for the whole matrix, for each row, or for each block). Scales
multiply, except where GPTQModel's config says that they divide. The config may also say how activations are to be
rounded, with scales of each token (dynamic) or with ``input_scale`` (static), which becomes the ``activation`` of
formats. With zero points of activations they are not rounded: the results are those of the weights as stored, with
exact activations. Imports torch only to dequantize.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import DTYPE_BYTES, QuantFormat, QuantScheme, Rounding, WeightPart, plain
from evener.errors import CheckpointError
from evener_formats.rules import malformed, word

if TYPE_CHECKING:
    import torch

_PLAIN = ("float32", "float16", "bfloat16")
_STORED = ("float8_e4m3fn", "float8_e5m2", "int8")
#: Bytes of a scale. ``float8_e8m0fnu`` is a power of two (UE8M0).
_SCALES: Mapping[str, float] = {**{dtype: DTYPE_BYTES[dtype] for dtype in _PLAIN}, "float8_e8m0fnu": 1}
#: Rows or columns of a block, the usual one first. All are powers of two, so that a shape of several blocks fits one
#: of them only.
_BLOCKS = (128, 64, 32, 16, 256)
_SUFFIXES = ("_scale_inv", "_scale")
#: GPTQModel's word for scales that divide.
_INVERSE = "inverse"
#: What says how activations were rounded, beside a weight: a fixed scale, and what is not used.
_FIXED, _UNUSED = "input_scale", ("input_scale_ub", "input_zero_point")
#: Elements that are dequantized at a time, so that the float32 copy stays small.
_SLICE = 1 << 22


class ScaledScheme(QuantScheme):
    """Matrices of eight bits, and their scales. A weight without scales is not quantized.

    Attributes:
        block: rows and columns of a block, if the config says it; else they follow from the number of scales.
    """

    methods: tuple[str, ...]
    block: tuple[int, int] | None = None

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") in self.methods

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in headers), None)
        if scale is None:
            return {"weight": name}
        # Without a role they would be tensors that belong to no weight.
        stem = name.removesuffix(".weight")
        beside = {"activation_scale": f"{stem}.{_FIXED}", **{end: f"{stem}.{end}" for end in _UNUSED}}
        return {"weight": name, "scale": scale, **{role: each for role, each in beside.items() if each in headers}}

    def rounding(self, name: str, form: QuantFormat) -> Rounding | None:
        """How activations may be rounded before products with the weight ``name``, as the config says. A fixed scale
        may be missing."""
        del name, form
        return None

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if name not in headers:
            return None
        dtype, shape = headers[name]
        roles = self.tensors(name, headers)
        if dtype in _PLAIN and "scale" not in roles:
            rows, columns = shape[-2:] if len(shape) in (2, 3) else (0, 0)
            return WeightPart(name, rows, columns, plain(dtype))
        if "scale" not in roles:
            raise CheckpointError(
                f"{name} is stored as {dtype}, but its scales, {name}_scale_inv or {name}_scale, are missing; fetch "
                "the files again"
            )
        scale, scales = headers[roles["scale"]]
        # A stack of matrices has a stack of scales.
        stack = 1 if len(shape) == 3 and len(scales) == 3 and shape[0] == scales[0] else 0
        readable = dtype in _STORED and scale in _SCALES
        form = _format(dtype, shape[stack:], scale, scales[stack:], self.block) if readable else None
        if form is None:
            raise CheckpointError(
                f"{name} is stored as {dtype} {list(shape)} with scales as {scale} {list(scales)}; evener reads "
                f"matrices in {', '.join(_STORED)} with one scale in all, one for each row, or one for each block of "
                f"{', '.join(map(str, sorted(_BLOCKS)))} rows or columns, in {', '.join(_SCALES)}; fetch the files "
                "again"
            )
        if f"{name}_zero_point" in headers:
            raise CheckpointError(
                f"{name} has zero points, {name}_zero_point, which {self.name} reads in no format; use a checkpoint "
                "with symmetric quantization"
            )
        rows, columns = shape[stack:]
        form = self._with_rounding(name, form, roles, headers, rows * columns)
        return WeightPart(name, rows, columns, replace(form, stack=bool(stack)))

    def _with_rounding(
        self, name: str, form: QuantFormat, roles: Mapping[str, str], headers: Headers, count: int
    ) -> QuantFormat:
        """The format with what ``rounding`` says, if all that it needs is there."""
        how, fixed = self.rounding(name, form), headers.get(roles.get("activation_scale", ""))
        if how is None or "input_zero_point" in roles or (how.group < 0 and fixed is None):
            return form
        if fixed is not None and (fixed[0] not in _PLAIN or math.prod(fixed[1]) != 1):
            raise CheckpointError(
                f"{roles['activation_scale']} is stored as {fixed[0]} {list(fixed[1])}; a scale of activations is one "
                f"number in {', '.join(_PLAIN)}; fetch the files again"
            )
        return replace(form, activation=how)

    def arrange(self, part: WeightPart) -> WeightPart:
        how = part.format.activation
        if how is not None and how.group < 0 and not float(part.tensors["activation_scale"]) > 0:
            raise CheckpointError(
                f"the input_scale of {part.name} is {float(part.tensors['activation_scale']):g}, and a scale is more "
                "than zero; fetch the files again"
            )
        return part

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        weight, wanted = part.tensors["weight"], getattr(torch, dtype)
        if part.format.plain:
            return weight.to(wanted)
        high, wide = _block(part)
        scale = part.tensors["scale"].float().reshape(-(-part.rows // high), -(-part.columns // wide))
        out = torch.empty(part.rows, part.columns, dtype=wanted, device=weight.device)
        step = max(1, _SLICE // max(1, part.columns) // high) * high
        for at in range(0, part.rows, step):
            rows = weight[at : at + step].float()
            factors = scale[at // high : -(-(at + rows.shape[0]) // high)]
            factors = factors.repeat_interleave(high, 0)[: rows.shape[0]] if high > 1 else factors
            factors = factors.repeat_interleave(wide, 1)[:, : part.columns]
            out[at : at + step] = rows.mul_(factors)
        return out

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        out = axis == "out"
        extent = part.rows if out else part.columns
        if not 0 <= start < stop <= extent:
            raise CheckpointError(f"cannot cut {start}..{stop} out of the {extent} {axis}-features of {part.name}")
        unit = 1 if part.format.plain else _block(part)[0 if out else 1]
        # One scale for all of an axis fits any piece of it.
        unit = 1 if unit >= extent else unit
        if start % unit or (stop % unit and stop != extent):
            first, last = start // unit * unit, min(extent, -(-stop // unit) * unit)
            raise CheckpointError(
                f"cannot cut {start}..{stop} out of the {axis}-features of {part.name}: they are stored in blocks of "
                f"{unit}, so both ends must be multiples of {unit}, such as {first} and {last}"
            )
        dim = 0 if out else 1
        tensors = {}
        for role, tensor in part.tensors.items():
            if role == "weight":
                tensors[role] = tensor.narrow(dim, start, stop - start)
            elif role == "scale" and tensor.dim() > dim and tensor.shape[dim] > 1:
                first = start // unit
                tensors[role] = tensor.narrow(dim, first, -(-stop // unit) - first)
            else:
                tensors[role] = tensor
        size = {"rows": stop - start} if out else {"columns": stop - start}
        return replace(part, **size, tensors=tensors)  # type: ignore[arg-type]

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random = torch.Generator().manual_seed(seed)
        config = {"quantization_config": {"quant_method": self.methods[0]}}
        cases: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], str], ...] = (
            ("float8_e4m3fn", "float32", (6, 10), (), "_scale"),
            ("float8_e4m3fn", "float32", (6, 10), (6, 1), "_scale"),
            ("float8_e4m3fn", "float32", (160, 272), (2, 3), "_scale_inv"),
            ("float8_e4m3fn", "bfloat16", (96, 64), (3, 2), "_scale_inv"),
            ("float8_e4m3fn", "float8_e8m0fnu", (256, 256), (2, 2), "_scale_inv"),
            ("float8_e5m2", "float32", (6, 10), (1,), "_scale"), ("int8", "bfloat16", (6, 10), (6, 1), "_scale"),
        )  # fmt: skip
        for stored, kind, shape, scales, suffix in cases:
            numbers = torch.randint(-100, 100, shape, generator=random) if stored == "int8" else torch.randn(
                shape, generator=random) * 50  # fmt: skip
            factors = torch.rand(scales, generator=random) / 64 + 1 / 256
            tensors = {name: numbers.to(getattr(torch, stored)), name + suffix: factors.to(getattr(torch, kind))}
            yield config, {name: (stored, shape), name + suffix: (kind, scales)}, tensors
        yield config, {name: ("bfloat16", (6, 10))}, {name: torch.randn(6, 10, generator=random).bfloat16()}


class Fp8Scheme(ScaledScheme):
    """``"quant_method": "fp8"``, and Meta's ``"fbgemm_fp8"``, whose upper bound of activations no kernel knows.

    Args:
        activations: "dynamic" or "static", as the config says; other words: they are not rounded.
        block: see ``ScaledScheme``.
        divides: whether stored scales divide, as GPTQModel's do.
    """

    name, methods = "fp8", ("fp8", "fbgemm_fp8")

    def __init__(
        self, activations: str = "", block: tuple[int, int] | None = None, divides: bool = False
    ) -> None:  # fmt: skip
        self._activations, self.block, self._divides = activations, block, divides

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings, said = config["quantization_config"], config["quantization_config"].get("weight_block_size")
        known = isinstance(said, list) and len(said) == 2 and all(type(n) is int and n in _BLOCKS for n in said)
        if said is not None and not known:
            sizes = ", ".join(map(str, sorted(_BLOCKS)))
            raise malformed(settings, "weight_block_size", f"two of {sizes}, the rows and columns of a block, or null")
        meaning = settings.get("weight_scale_semantics")
        if meaning not in (None, _INVERSE):
            raise CheckpointError(
                f"config.json's quantization_config has weight_scale_semantics {str(meaning)[:40]!r}; {self.name} "
                f"reads scales that multiply, and with {_INVERSE!r} those that divide; use such a checkpoint"
            )
        own = settings["quant_method"] == "fp8"
        activations = word(settings, "activation_scheme", ("dynamic", "static")) if own else None
        return Fp8Scheme(activations or "", (said[0], said[1]) if known else None, meaning == _INVERSE)

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        part = super().part(name, headers)
        if self._divides and part is not None and part.format.scale not in (None, "float32"):
            raise CheckpointError(
                f"the scales of {name} are {part.format.scale}, and scales that divide are read in float32; use such a "
                "checkpoint"
            )
        return part

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        return super().dequantize(self._multiplying(part), dtype)

    def arrange(self, part: WeightPart) -> WeightPart:
        return super().arrange(self._multiplying(part))

    def _multiplying(self, part: WeightPart) -> WeightPart:
        """A part whose scales multiply."""
        scale = part.tensors.get("scale")
        if not self._divides or scale is None:
            return part
        if bool((scale == 0).any()):
            raise CheckpointError(f"a scale of {part.name}, which divides, is zero; fetch the files again")
        return replace(part, tensors={**part.tensors, "scale": 1 / scale})

    def rounding(self, name: str, form: QuantFormat) -> Rounding | None:
        if self._activations == "static":
            return Rounding(_STORED[0], -1)
        return Rounding(_STORED[0], max(0, form.group)) if self._activations == "dynamic" else None


def _format(
    dtype: str, shape: tuple[int, ...], scale: str, scales: tuple[int, ...], block: tuple[int, int] | None
) -> QuantFormat | None:
    """The format of a matrix with such scales; None if they do not fit. ``block``: as in ``ScaledScheme``."""
    if len(shape) != 2 or not min(shape):
        return None
    rows, columns = shape
    count = math.prod(scales)
    # Bits of all scales, spread over the elements.
    bits = 8 + count * _SCALES[scale] * 8 / (rows * columns)
    if count == 1:
        return QuantFormat(dtype, group=-1, scale=scale, bits=bits)
    if scales in ((rows,), (rows, 1)):
        return QuantFormat(dtype, group=0, scale=scale, bits=bits)
    if len(scales) != 2:
        return None
    # A piece of a matrix may be smaller than a block: several sizes fit its few scales.
    for high, wide in (*((block,) if block else ()), *product(_BLOCKS, _BLOCKS)):
        if (-(-rows // high), -(-columns // wide)) == scales:
            return QuantFormat(dtype, group=wide, group_out=high, scale=scale, bits=bits)
    return None


def _block(part: WeightPart) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    form = part.format
    if form.group == -1:
        return part.rows, part.columns
    return form.group_out, form.group or part.columns
