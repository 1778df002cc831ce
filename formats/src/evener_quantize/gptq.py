"""GPTQ (Frantar, Ashkboos, Hoefler and Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", algorithm 1): columns are rounded one after another, and the error of each is made up for in
those that follow, as the inverse of the inputs' second moments says."""

from __future__ import annotations

import torch

from evener.errors import EngineError
from evener_quantize.rounding import Grid, Rounded, neighbours
from evener_quantize.settings import Order

#: The damping added to the diagonal, as a share of its mean; more if that is not enough.
DAMPING = 0.01
#: Columns whose errors are passed on to all later ones at once.
_BLOCK = 128


def gptq(weight: torch.Tensor, gram: torch.Tensor, grid: Grid, group: int, order: Order) -> Rounded:
    """Round ``weight`` [rows, columns].

    Args:
        gram: XᵀX of its inputs, float32 [columns, columns]; a column without input is rounded to nearest.
        group: columns of a group; it divides the columns.
        order: as in ``Settings``.

    Raises:
        EngineError: ``gram`` is not finite.
    """
    rows, columns = weight.shape
    diagonal = gram.diagonal()
    chosen = torch.arange(columns, device=weight.device)
    if order != "none":
        chosen = diagonal.argsort(descending=True, stable=True)
    upper = _inverse_root(gram[chosen][:, chosen])
    work = weight.float()[:, chosen]
    index = neighbours(columns, group, weight.device)
    # The group of each column in the order in which they are rounded.
    of_column = (index[chosen] if order == "static" else index).tolist()
    scales = torch.ones(rows, columns // group, device=weight.device)
    zeros = torch.zeros_like(scales)
    if order == "static":
        scales, zeros = grid.fit(weight.float().reshape(rows, -1, group))
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block, root = work[:, start:stop], upper[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            at = start + i
            if order != "static" and at % group == 0:
                scales[:, of_column[at]], zeros[:, of_column[at]] = grid.fit(work[:, at : at + group])
            scale, zero = scales[:, of_column[at]], zeros[:, of_column[at]]
            code = grid.codes(block[:, i], scale, zero)
            errors[:, i] = (block[:, i] - (code - zero) * scale) / root[i, i]
            block[:, i + 1 :].addr_(errors[:, i], root[i, i + 1 :], alpha=-1)
            codes[:, chosen[at]] = code.to(torch.uint8)
        work[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    if order == "groups":
        index = torch.empty_like(index).scatter_(0, chosen, index)
    return Rounded(codes, scales.half(), zeros.to(torch.uint8), index)


def _inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped ``gram``."""
    if not bool(gram.isfinite().all()):
        raise EngineError("the inputs of a layer are too large, or NaN; set dtype=float32, or give another text")
    diagonal = gram.diagonal()
    live = diagonal[diagonal > 0]
    mean = live.mean() if live.numel() else torch.ones((), device=gram.device)
    # Without input there is no error to make up for: any number serves.
    full = gram + torch.diag((diagonal <= 0) * mean)
    share = DAMPING
    while share < 1e3:
        lower, failed = torch.linalg.cholesky_ex(full + torch.eye(len(full), device=gram.device) * (mean * share))
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return torch.triu(upper)
        share *= 10
    raise EngineError("the inputs of a layer have no inverse; give a longer text, with --tokens")
