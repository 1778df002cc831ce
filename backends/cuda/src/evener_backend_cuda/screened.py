"""The head's weight for the search of the largest logit: as it is, and as codes of four bits that are read instead.

A weight, less the mean of all rows (which changes every logit by the same number), is coded with subtractive dither: a
random number between -1/2 and 1/2, one for each column, is added before it is rounded, and taken off again where the
code is used. Then the error is evenly distributed, whatever the weight is (Schuchman 1964), and a logit's error is a
sum of independent such numbers: it is more than ``t`` with a probability of at most ``exp(-6 t² / Σ (scale x)²)``.
``screened_head.py`` uses that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener.ops.reference.linear import PLAIN

#: Columns that the kernel reads at a time, in 16 bytes of codes; and columns that have one scale, as the last ones do.
CHUNK, GROUP = 32, 128
#: The middle of the codes, and the largest distance to it of a weight, in scales: with dither and rounding codes are
#: from 0 to 15.
_MIDDLE, _REACH = 7.5, 7
#: Rows that are coded at a time, which bounds the memory of it.
_ROWS_AT_ONCE = 4096
#: A scale is rounded to bfloat16, so it is made larger by more than that.
_ROOM = 1 + 2**-7
_SEED = 20


class ScreenedMatrix(NamedTuple):
    """A matrix and its codes.

    Attributes:
        values: bfloat16 [rows, columns], the weight as it is.
        codes: uint8 [rows, columns / 2]. Of 32 columns, which are 16 bytes, word k has columns 8 k to 8 k + 3 in the
            lower halves of its bytes, and the four after them in the upper ones.
        scales: bfloat16 [rows, columns / GROUP], rounded up.
        mean: bfloat16 [columns], about the mean of all rows; codes are of what is left without it.
        dither: float32 [columns]. A code q stands for ``scale * (q - 7.5 - dither) + mean``.
    """

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor
    dither: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self)


class ScreenedPacking(Packing):
    """Packs matrices in bfloat16 with their codes."""

    layout = "cuda.screened"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if reason := PLAIN.supports(parts, dtype):
            return reason
        if dtype != "bfloat16":
            return f"holds bfloat16, not {dtype}"
        columns = parts[0].columns
        return f"holds multiples of {CHUNK} columns, not {columns}" if columns % CHUNK else None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        rows, columns = sum(part.rows for part in parts), parts[0].columns
        return PLAIN.nbytes(parts, dtype) + rows * (columns // 2 + _groups(columns) * 2) + columns * 6

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return PLAIN.keeps_storage(parts)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        plain = PLAIN.pack(parts, dtype, device)
        values = aligned(plain.data)
        data = ScreenedMatrix(values, *encode(values))
        return PackedWeight(self.layout, plain.shape, data, data.nbytes, plain.formats)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        return tuple(packed.data)

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        rows, columns = sum(part.rows for part in parts), parts[0].columns
        bf16 = torch.bfloat16
        wanted = [((rows, columns), bf16), ((rows, columns // 2), torch.uint8), ((rows, _groups(columns)), bf16),
                  ((columns,), bf16), ((columns,), torch.float32)]  # fmt: skip
        if count or [(tuple(t.shape), t.dtype) for t in tensors] != wanted:
            raise ValueError(f"the packing {self.layout} holds {wanted}")
        data = ScreenedMatrix(*tensors)
        return PackedWeight(self.layout, (rows, columns), data, data.nbytes, tuple(part.format for part in parts))


SCREENED = ScreenedPacking()


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, mean and dither of a matrix; see ``ScreenedMatrix``. Equal matrices have equal codes."""
    rows, columns = values.shape
    where, groups = values.device, _groups(columns)
    # Drawn on the host: another device would draw other numbers.
    drawn = torch.rand(columns, generator=torch.Generator().manual_seed(_SEED)) - 0.5
    mean, dither = values.mean(0, dtype=torch.float32).to(torch.bfloat16), drawn.to(where)
    added = F.pad(dither + (_MIDDLE + 0.5), (0, groups * GROUP - columns)).view(groups, GROUP)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=where)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=where)
    for first in range(0, rows, _ROWS_AT_ONCE):
        some = slice(first, min(rows, first + _ROWS_AT_ONCE))
        left = F.pad(values[some].float() - mean.float(), (0, groups * GROUP - columns)).view(-1, groups, GROUP)
        scales[some] = left.abs().amax(2) * (_ROOM / _REACH)
        # Where all numbers of a group are 0, so is its scale, and codes do not matter.
        scale = scales[some].float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        whole = left.div_(scale).add_(added).floor_().clamp_(0, 15).to(torch.uint8)
        fours = whole.view(-1, groups * GROUP // 8, 2, 4)[:, : columns // 8]
        codes[some] = (fours[:, :, 0] | fours[:, :, 1] << 4).reshape(-1, columns // 2)
    return codes, scales, mean, dither


def decoded(matrix: ScreenedMatrix) -> torch.Tensor:
    """float32 [rows, columns]: what the codes stand for."""
    rows, columns = matrix.values.shape
    halves = matrix.codes.view(rows, columns // 8, 1, 4)
    whole = torch.cat((halves & 15, halves >> 4), dim=2).view(rows, columns)
    scales = matrix.scales.float().repeat_interleave(GROUP, 1)[:, :columns]
    return (whole.float() - _MIDDLE - matrix.dither) * scales + matrix.mean.float()


def distance(columns: int, chance: float) -> tuple[float, float]:
    """How far a logit may be above that of the codes, as two factors: of the square root of ``Σ (scale x)²`` over the
    columns, and of ``Σ |mean x|``. More is missed with a probability of ``chance``; the rest are bounds of rounding.

    - A number between -a and a that is evenly distributed has ``E exp(t e) <= exp(t² a² / 6)``, and so has Chernoff's
      bound for a sum of independent ones ``exp(-3 t² / (2 Σ a²))``; here a is half of ``scale x``.
    - x is rounded to whole numbers, of which the largest of 32 columns is 32,512: at most half of one in each column.
    - Logits are sums in float32, in turns of 32 columns: compared are two of them, and the mean row's.
    """
    chernoff = math.sqrt(math.log(1 / chance) / 6)
    rounding_x = 8 * 32 / 2 / 32_512 * math.sqrt(columns / 32)
    adding = 4 * (columns / 32 + 32) * 2**-24
    return (chernoff + rounding_x + adding * 8 * math.sqrt(columns)) * 1.002, adding


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it has gaps or does not begin at a multiple of 16 bytes, which are read at a time."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _groups(columns: int) -> int:
    return -(-columns // GROUP)
