"""Ops of latent attention that do not use state: one matrix per head, and attention over a piece of a context."""

from __future__ import annotations

import math

import torch

from evener.contracts.ops import OpFunction, Static, Use


def head_linear(static: Static, use: Use) -> OpFunction:
    transposed = static["transposed"]

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        right = weight if transposed else weight.transpose(1, 2)
        return torch.bmm(x.transpose(0, 1), right).transpose(0, 1)

    return run


def partial_attention(static: Static, use: Use) -> OpFunction:
    scale = static["scale"]

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("thd,khd->thk", query.float(), key.float()) * scale
        at = torch.arange(query.shape[0], device=query.device)[:, None, None] + offset
        scores = scores.masked_fill(torch.arange(key.shape[0], device=query.device) > at, -math.inf)
        total = scores.logsumexp(-1)
        # A query before the whole piece reads no key of it, and -inf minus -inf would be NaN.
        weights = torch.exp(scores - total.masked_fill(total == -math.inf, 0.0)[..., None])
        return torch.einsum("thk,khd->thd", weights, value.float()), total

    return run
