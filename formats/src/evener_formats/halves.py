"""The scheme "halves": integers in groups as a device vendor's script (transform_safetensors.py) stores those of GPTQ
and AWQ checkpoints, for its own engine.

A linear weight ``<layer>.weight`` [rows, columns] of four bits is stored as ``<layer>.qweight`` uint8 [rows, padded
columns / 2], ``scales`` [groups, rows] and ``qzeros`` [groups, rows], zero points times scales in the dtype of the
scales. Columns are padded to runs of 128: byte j of a run has column j in its low half and column 64 + j in its high
half. Of eight bits it is ``qweight`` int8 [rows, columns] and ``scales``, without zero points. A layer without
``qweight`` is not quantized. ``config.json`` names the method that the numbers came from and, if evener wrote it,
``"layout": "halves"``. Imports torch only to read weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.quant import QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.gptq import HALVES, Layer, integer_format, integer_tensors
from evener_formats.rules import malformed, number

if TYPE_CHECKING:
    import torch

#: Values of ``quant_method`` in such folders: the method of the numbers, or what the vendor's engine calls eight bits.
METHODS = ("gptq", "awq", "w8a16")
#: Columns of a run.
RUN = 128
#: How far a stored zero point times its scale, divided by the scale again, may be from a whole number: bfloat16 rounds
#: both by 2^-9, and the largest zero point is 15.
_NEAR = 0.1


class HalvesScheme(BesideScheme):
    """``"layout": "halves"``.

    Args:
        layer: group and symmetry of all layers; the dtype of ``qweight`` says the bits.
    """

    name = HALVES

    def __init__(self, layer: Layer | None = None) -> None:
        self._layer = layer or Layer()

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("layout") == HALVES

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings, method = config["quantization_config"], config["quantization_config"].get("quant_method")
        if method not in METHODS:
            raise CheckpointError(
                f"config.json's quantization_config has the layout {HALVES!r} and quant_method {str(method)[:40]!r}; "
                f"it is read with {', '.join(METHODS)}; correct the file"
            )
        if number(settings, ("bits", "w_bit"), 4) not in (4, 8):
            raise malformed(settings, "bits" if "bits" in settings else "w_bit", "4 or 8")
        # A zero point is stored for each group whatever the config says; of "awq" it may be any number.
        symmetric = False if method == "awq" else settings.get("sym", True)
        layer = Layer.of({**settings, "bits": 4, "w_bit": 4, "sym": symmetric}, self.name)
        if layer.act_order:
            raise CheckpointError(
                "config.json's quantization_config has desc_act: true, and this layout has only groups of neighbouring "
                'columns; set "desc_act": false if the weights were stored without it'
            )
        return HalvesScheme(layer)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        stem = name.removesuffix(".weight")
        if name == stem or f"{stem}.qweight" not in headers:
            return {"weight": name}
        roles = {role: f"{stem}.{role}" for role in ("qweight", "scales")}
        return {**roles, "qzeros": f"{stem}.qzeros"} if headers[roles["qweight"]][0] == "uint8" else roles

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        roles = self.tensors(name, headers)
        if "qweight" not in roles:
            return super().part(name, headers)
        absent = ("nothing", ())
        (kind, shape), (scale, scales) = (headers.get(roles[role], absent) for role in ("qweight", "scales"))
        four, group = "qzeros" in roles, self._layer.group
        zeros = headers.get(roles["qzeros"], absent) if four else (scale, scales)
        rows, width = shape if len(shape) == 2 else (0, 0)
        groups = scales[0] if len(scales) == 2 else 0
        columns = stored = 2 * width if four else width
        if four and group and -(-columns // group) != groups:
            columns = groups * group  # the rest is what fills the last run
        group = 0 if group >= columns else group
        fits = (
            kind == ("uint8" if four else "int8") and scale in PLAIN and zeros == (scale, scales) and rows > 0 < columns
            and scales == (-(-columns // group) if group else 1, rows)
            and stored == (-(-columns // RUN) * RUN if four else columns)
        )  # fmt: skip
        if not fits or (four and group % 2):
            raise CheckpointError(
                f"{name.removesuffix('.weight')} is stored as qweight {kind} {list(shape)}, scales {scale} "
                f"{list(scales)} and qzeros {zeros[0]} {list(zeros[1])}, which are not those of groups of "
                f"{self._layer.group or 'whole rows'}: uint8 [rows, columns / 2] in runs of {RUN} columns with scales "
                "and zero points [groups, rows], or int8 [rows, columns] with scales; use the config.json that was "
                "published with these weights"
            )
        form = integer_format(self._of(four), columns, group, scale)
        return WeightPart(name, rows, columns, replace(form, cut=(1, lcm(RUN if four else 1, group or 1))))

    def _of(self, four: bool) -> Layer:
        return replace(self._layer, bits=4) if four else replace(self._layer, bits=8, symmetric=True)

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        group = part.format.group
        beside = Axes(Along(1), Along(0, group) if group else None)
        along = Along(1) if part.format.storage == "int8" else None  # runs: see ``cut``
        return {"qweight": Axes(Along(0), along), "scales": beside, "qzeros": beside}

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        piece = super().cut(part, axis, start, stop)
        if axis == "out" or part.format.storage != "uint4":
            return piece
        first, last = start // RUN, -(-stop // RUN)
        runs = piece.tensors["qweight"].narrow(1, first * RUN // 2, (last - first) * RUN // 2)
        return replace(piece, tensors={**piece.tensors, "qweight": runs})

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        if part.format.plain:
            return part
        stored, four = part.tensors, part.format.storage == "uint4"
        scales = stored["scales"].T
        if four:
            numbers, zeros = from_runs(stored["qweight"])[:, : part.columns], self._zeros(part)
        else:
            numbers, zeros = stored["qweight"].view(torch.uint8) ^ 128, torch.full((1, 1), 128, dtype=torch.uint8)
        return replace(part, tensors=integer_tensors(part, self._of(four), numbers, zeros, scales))

    def _zeros(self, part: WeightPart) -> torch.Tensor:
        """The zero points, uint8 [rows, groups].

        Raises:
            CheckpointError: a stored value is no whole number from 0 to 15 times the scale.
        """
        import torch

        scale, product = (part.tensors[role].T.float() for role in ("scales", "qzeros"))
        # Without a scale all numbers of the group are 0, whatever the zero point.
        found = torch.where((scale == 0) & (product == 0), 8.0, product / scale)
        zeros = found.round()
        if not bool(((found - zeros).abs() <= _NEAR).all() and ((zeros >= 0) & (zeros <= 15)).all()):
            raise CheckpointError(
                f"{part.name.removesuffix('.weight')}.qzeros divided by its scales is not everywhere a whole number "
                "from 0 to 15; fetch or convert the files again"
            )
        return zeros.to(torch.uint8)

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, stem = torch.Generator().manual_seed(seed), name.removesuffix(".weight")
        for method, group, kind, columns in (
            ("gptq", 64, "float16", 256), ("awq", 128, "bfloat16", 384), ("awq", 32, "float16", 288),
            ("gptq", -1, "float16", 256), ("w8a16", 128, "float16", 256),
        ):  # fmt: skip
            rows, groups = 48, -(-columns // group) if group > 0 else 1
            # Weights stay below one, as in other schemes' examples.
            small = 1024 if method == "w8a16" else 64
            scales = ((torch.rand(groups, rows, generator=random) + 1) / small).to(getattr(torch, kind))
            tensors = {f"{stem}.scales": scales}
            if method == "w8a16":
                words = torch.randint(-127, 128, (rows, columns), generator=random)
                tensors[f"{stem}.qweight"] = words.to(torch.int8)
            else:
                zeros = torch.randint(0, 16, scales.shape, generator=random) if method == "awq" else 8
                numbers = torch.randint(0, 16, (rows, columns), generator=random).to(torch.uint8)
                tensors |= {f"{stem}.qweight": in_runs(numbers), f"{stem}.qzeros": zeros * scales}
            headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            settings = {"quant_method": method, "layout": HALVES, "group_size": group}
            yield {"quantization_config": settings}, headers, tensors
        noise = torch.randn(6, 10, generator=random).bfloat16()
        yield {"quantization_config": settings}, {name: ("bfloat16", (6, 10))}, {name: noise}


def in_runs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, uint8 [rows, columns], as bytes [rows, padded columns / 2]."""
    import torch

    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % RUN))
    low, high = padded.unflatten(1, (-1, 2, RUN // 2)).unbind(2)
    return torch.bitwise_or(low, high << 4).flatten(1)


def from_runs(stored: torch.Tensor) -> torch.Tensor:
    """What ``in_runs`` had, with its padding."""
    import torch

    runs = stored.unflatten(1, (-1, RUN // 2))
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1)


class HalvesFolder(CheckpointView):
    """A folder that the vendor's script wrote: its ``config.json`` is that of the model it was made from, and says
    nothing of the layout. With it."""

    changes = "files"

    @classmethod
    def of(cls, request: ViewRequest) -> HalvesFolder | None:
        settings = request.checkpoint.config.get("quantization_config")
        if not isinstance(settings, Mapping) or settings.get("quant_method") not in METHODS or "layout" in settings:
            return None
        headers = request.checkpoint.headers
        kinds = {kind for name, (kind, _) in headers.items() if name.endswith(".qweight")}
        return cls(request.checkpoint) if kinds and kinds <= {"uint8", "int8"} else None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return {
            **self.inner.config, "quantization_config": {**self.inner.config["quantization_config"], "layout": HALVES},
        }  # fmt: skip
