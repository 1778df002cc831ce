"""AWQ (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"): channels
with large inputs are scaled up before rounding, and what makes these inputs is scaled down; then groups are clipped.
Errors of results are computed from XᵀX, so no inputs are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener_quantize.rounding import Grid, nearest

#: Exponents of the mean input that are tried: 0, 1/20, … (equation 5).
_STEPS = 20
#: Clips that are tried, as shares of a group's largest magnitude.
_CLIPS = tuple(1 - step / 20 for step in range(10))


def result_error(change: torch.Tensor, gram: torch.Tensor) -> float:
    """Σ ‖x · changeᵀ‖² over the inputs x of which ``gram`` is XᵀX."""
    return float((change @ gram).mul_(change).sum())


def channel_scales(
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]], magnitude: torch.Tensor, grid: Grid, group: int,
    repeat: tuple[int, int] | None = None, shares: Sequence[float] | None = None,
) -> torch.Tensor:  # fmt: skip
    """What the columns of matrices are multiplied by before they are rounded, float32 [columns].

    Args:
        weights: matrices [rows, columns] that read the same channels, each with XᵀX of its inputs.
        magnitude: mean magnitude of each channel, float32 [columns].
        repeat: (n, width): channels come in units of n times ``width``, and the n times get the same scales, because
            they are made by the same rows (value heads that several query heads share); None: each its own.
        shares: which part of the inputs each matrix gets; None: each all.
    """
    if repeat is not None:
        count, width = repeat
        magnitude = magnitude.view(-1, count, width).mean(1, keepdim=True).expand(-1, count, -1).flatten()
    magnitude = magnitude.clamp(min=1e-4 * float(magnitude.max().clamp(min=1e-20)))
    best, found = float("inf"), torch.ones_like(magnitude)
    for step in range(_STEPS):
        scales = magnitude.pow(step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for (weight, gram), share in zip(weights, shares or [1.0] * len(weights), strict=True):
            change = nearest(weight * scales, grid, group).values() / scales - weight
            error += share * result_error(change, gram)
        if error < best:
            best, found = error, scales
    return found


def clips(weight: torch.Tensor, gram: torch.Tensor, grid: Grid, group: int) -> torch.Tensor:
    """The largest magnitude of each group with which its own results have the least error, float32 [rows, groups].

    Args:
        gram: XᵀX of the inputs of ``weight`` [rows, columns].
    """
    rows, columns = weight.shape
    count = columns // group
    blocks = gram.view(count, group, count, group).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, group, group]
    largest = weight.view(rows, count, group).abs().amax(-1)
    best, found = torch.full_like(largest, torch.inf), largest
    for share in _CLIPS:
        change = (nearest(weight, grid, group, largest * share).values() - weight).view(rows, count, group)
        error = (torch.einsum("rgc,gcd->rgd", change, blocks) * change).sum(-1)
        better = error < best
        best, found = torch.where(better, error, best), torch.where(better, largest * share, found)
    return found
