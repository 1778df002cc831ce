"""Random numbers of quantized weights for ``load=dummy``: in each format of ``evener.contracts.storage``, with scales
that make weights of about the same size as those of a plain model."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from evener.contracts.quant import BLOCKS, MXFP4, WeightPart
from evener.errors import CheckpointError

#: Numbers in one period; a prime, so that rows of any power-of-two width differ although the noise repeats.
PERIOD = 1_048_573
#: Standard deviations of elements: of 16 integers in a row, of what is drawn for one byte, of the 16 floats of four
#: bits.
_FOUR, _INT8, _FLOAT8, _FLOAT4 = 4.61, 20.0, 40.0, 2.94
#: Elements of one byte; the others are two in one.
_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")
_SIZES = {"int8": _INT8, "uint4": _FOUR, "float4_e2m1": _FLOAT4, "nf4": 0.62, "fp4": 0.62}
#: Where in a block the float16 scales and minima are, and what they are for weights of deviation 1: for the k-types,
#: the numbers of six or four bits that multiply them have the mean that is in the comment.
_BLOCK_SCALES: dict[str, dict[int, float]] = {
    "q4_0": {0: 0.217}, "q4_1": {0: 0.217, 2: -1.63}, "q5_0": {0: 0.108}, "q5_1": {0: 0.108, 2: -1.68},
    "q8_0": {0: 0.0135},
    "q2_k": {80: 0.1, 82: 0.15},  # 7.5 of four bits
    "q3_k": {108: 0.0236},  # -0.5, deviation 18.5
    "q4_k": {0: 0.0055, 2: 0.0413}, "q5_k": {0: 0.0028, 2: 0.0434},  # 31.5 of six bits
    "q6_k": {208: 0.00073},  # -0.5, deviation 74
}  # fmt: skip


def repeated(period: torch.Tensor, name: str, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the period's numbers, again and again, from a place that ``name`` and ``seed`` decide."""
    out = torch.empty(shape, dtype=period.dtype, device=period.device)
    flat, at = out.view(-1), 0
    offset = zlib.crc32(name.encode(), seed & 0xFFFFFFFF) % PERIOD
    while at < flat.numel():
        count = min(PERIOD - offset, flat.numel() - at)
        flat[at : at + count] = period[offset : offset + count]
        at, offset = at + count, 0
    return out


class QuantizedNoise:
    """Makes parts with tensors.

    Args:
        seed: of all numbers, which depend on it, on the part's name and on its size.
        std: standard deviation of the weights, about.
    """

    def __init__(self, seed: int, std: float) -> None:
        self._seed, self._std = seed, std
        self._periods: dict[tuple[str, str], torch.Tensor] = {}

    def tensors(self, part: WeightPart, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a part that is not plain, as ``arrange`` would give them, on ``device``.

        Raises:
            CheckpointError: nobody has said how weights in its format are made.
        """
        form, rows, columns = part.format, part.rows, part.columns
        if form.storage in BLOCKS:
            return {"weight": self._blocks(part, device)}
        kind = form.storage if form.storage in _BYTE else "bytes"
        if form.storage not in (*_BYTE, *_SIZES):
            raise CheckpointError(
                f"load=dummy cannot fill {part.name}, which is stored as {form.storage}; use load=auto with real "
                "weights, or a config.json without quantization_config"
            )
        if form == MXFP4:
            exponents = torch.full((rows, columns // 32), 120, dtype=torch.uint8, device=device)  # 2 to the -7
            return {"weight": self._fill(part.name, "bytes", (rows, columns // 32, 16), device), "scale": exponents}
        shape = (rows, columns // 2) if kind == "bytes" else (rows, columns)
        tensors = {"weight": self._fill(part.name, kind, shape, device)}
        grouped: tuple[int, ...] = (-(-rows // form.group_out), form.row_scales(columns)) if form.group >= 0 else ()
        scale = self._std / _SIZES.get(form.storage, _FLOAT8)
        if form.storage == "float4_e2m1":
            tensors["factor"] = torch.full((), scale, device=device)
            scale = 1.0
        if form.storage in ("nf4", "fp4"):
            tensors["table"] = torch.linspace(-1, 1, 16, device=device)
        tensors["scale"] = torch.full(grouped, scale, device=device).to(getattr(torch, str(form.scale)))
        if form.zero:
            middle = 8 if form.zero == "uint8" else 0
            tensors["zero"] = torch.full(grouped, middle, dtype=getattr(torch, form.zero), device=device)
        if form.order == "act":
            number, groups = torch.arange(columns, device=device), form.row_scales(columns)
            even = columns == groups * form.group or groups != -(-columns // form.group)
            tensors["group_index"] = (number % groups if even else number // form.group).to(torch.int32)
        if form.activation is not None and form.activation.group < 0:
            # Normed activations reach about 4.
            largest = 127.0 if form.activation.storage == "int8" else 448.0
            tensors["activation_scale"] = torch.full((), 4.0 / largest, device=device)
        return tensors

    def _blocks(self, part: WeightPart, device: torch.device) -> torch.Tensor:
        elements, nbytes = BLOCKS[part.format.storage]
        made = self._fill(part.name, "bytes", (part.rows, part.columns // elements, nbytes), device)
        for at, scale in _BLOCK_SCALES[part.format.storage].items():
            made[..., at : at + 2] = torch.tensor([scale * self._std], dtype=torch.float16).view(torch.uint8).to(device)
        return made.flatten(1)

    def _fill(self, name: str, kind: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return repeated(self._period(kind, device), name, self._seed, shape)

    def _period(self, kind: str, device: torch.device) -> torch.Tensor:
        """One period of elements of a kind, drawn once."""
        key = (kind, str(device))
        if key not in self._periods:
            draw = torch.Generator().manual_seed(self._seed)
            normal: Callable[[], torch.Tensor] = lambda: torch.randn(PERIOD, generator=draw)  # noqa: E731
            if kind == "bytes":
                made = torch.randint(0, 256, (PERIOD,), generator=draw, dtype=torch.uint8)
            elif kind == "int8":
                made = (normal() * _INT8).round().clamp(-127, 127).to(torch.int8)
            else:
                made = (normal() * _FLOAT8).to(getattr(torch, kind))
            self._periods[key] = made.to(device)
        return self._periods[key]
