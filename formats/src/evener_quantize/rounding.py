"""Numbers in groups: a scale and a zero point for each, and a code for each number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST_HALF = 65504.0


@dataclass(frozen=True)
class Grid:
    """The codes that a group can have.

    Attributes:
        bits: of a code.
        symmetric: whether zero is the middle code.
        least_zero: the smallest zero point: 1 in a format that stores zero points less one.
    """

    bits: int
    symmetric: bool
    least_zero: int = 0

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def fit(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point, float32 [...], of groups [..., n] of float32: the range of codes is that of the
        numbers. A scale is one that float16 has."""
        if self.symmetric:
            high = numbers.abs().amax(-1)
            scale = _storable(2 * high / self.most)
            return scale, torch.full_like(scale, 1 << (self.bits - 1))
        low, high = numbers.amin(-1).clamp(max=0), numbers.amax(-1).clamp(min=0)
        # Where nothing is negative, one code below zero is lost to a zero point of at least one.
        span = torch.maximum(high - low, (high / (self.most - self.least_zero)) * self.most)
        scale = _storable(span / self.most)
        return scale, (-low / scale).round_().clamp_(self.least_zero, self.most)

    def codes(self, numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The nearest codes, as float32 in the shape of ``numbers``; scale and zero point are of a shape that fits."""
        return (numbers / scale).round_().add_(zero).clamp_(0, self.most)


@dataclass(frozen=True)
class Rounded:
    """A quantized matrix.

    Attributes:
        codes: uint8 [rows, columns].
        scales: float16 [rows, groups].
        zeros: uint8 [rows, groups].
        index: int32 [columns], the group of each column.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    index: torch.Tensor

    def values(self) -> torch.Tensor:
        """What it stands for, float32 [rows, columns]."""
        at = self.index.long()
        return (self.codes.float() - self.zeros.float()[:, at]) * self.scales.float()[:, at]

    def rows(self, start: int, stop: int) -> Rounded:
        """Some of its rows."""
        return Rounded(self.codes[start:stop], self.scales[start:stop], self.zeros[start:stop], self.index)


def nearest(weight: torch.Tensor, grid: Grid, group: int, clip: torch.Tensor | None = None) -> Rounded:
    """Every number of ``weight`` [rows, columns] as the nearest code of its group of ``group`` columns.

    Args:
        clip: [rows, groups], the largest magnitude that counts; None: all.
    """
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, -1, group)
    if clip is not None:
        groups = groups.clamp(-clip[..., None], clip[..., None])
    scale, zero = grid.fit(groups)
    codes = grid.codes(groups, scale[..., None], zero[..., None]).to(torch.uint8).view(rows, columns)
    return Rounded(codes, scale.half(), zero.to(torch.uint8), neighbours(columns, group, weight.device))


def neighbours(columns: int, group: int, device: torch.device) -> torch.Tensor:
    """The groups of neighbouring columns, int32 [columns]."""
    return (torch.arange(columns, device=device) // group).int()


def _storable(scale: torch.Tensor) -> torch.Tensor:
    half = scale.clamp(max=_MOST_HALF).half().float()
    return half.masked_fill_(half == 0, 1.0)
