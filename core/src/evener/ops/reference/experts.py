"""Routing of tokens to experts, and the weighted sum of the experts' results."""

from __future__ import annotations

import math

import torch

from evener.contracts.experts import ExpertMap
from evener.contracts.ops import OpFunction, Static, Use


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest of each row, largest first; ties go to the lowest id."""
    # A stable descending sort keeps equal scores in the order of their ids; topk does not promise that.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def route(static: Static, use: Use) -> OpFunction:
    top, scoring, renormalize, scale = (static[k] for k in ("top", "scoring", "renormalize", "scale"))
    groups, top_groups, group_best = (static[k] for k in ("groups", "top_groups", "group_best"))

    def score(logits: torch.Tensor) -> torch.Tensor:
        if scoring == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if scoring == "sigmoid" else logits

    def limit(wanted: torch.Tensor) -> torch.Tensor:
        """Scores, with -inf outside the groups with the highest sum of best scores."""
        grouped = wanted.unflatten(-1, (groups, -1))
        totals = grouped.topk(group_best, dim=-1).values.sum(-1)
        kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best(totals, top_groups), True)
        masked: torch.Tensor = grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)
        return masked

    def run(logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = score(logits.float())
        wanted = scores if bias is None else scores + bias
        ids = best(limit(wanted) if top_groups < groups else wanted, top)
        weights = scores.gather(1, ids)
        if scoring == "softmax_top":
            weights = weights.softmax(-1)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32), weights * scale

    return run


def place_experts(static: Static, use: Use) -> OpFunction:
    def run(ids: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        if slots.shape[1] == 1:
            return slots[:, 0][ids]
        return ExpertMap(slots, copies)(ids, torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device))

    return run


def mix_experts(static: Static, use: Use) -> OpFunction:
    def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # One copy in float32, multiplied in place: in a large step this is the peak of memory.
        mixed: torch.Tensor = x.to(torch.float32, copy=True).mul_(weights[..., None]).sum(1)
        return mixed.to(x.dtype)

    return run
