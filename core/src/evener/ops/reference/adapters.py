"""Adapters of linear weights (LoRA; Hu et al. 2021), of several requests in one step (Chen et al. 2023, Punica)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from evener.contracts.ops import OpFunction, Static, Use


def add_adapters(static: Static, use: Use) -> OpFunction:
    slots, rank, parts = static["slots"], static["rank"], static["parts"]

    def run(
        y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        # Every row meets every adapter, and keeps its own: the work is the same whatever the index holds.
        total, x = y.float(), x.float()
        for slot in range(slots):
            inner = F.linear(x, down[slot].float()).split(rank, dim=-1)
            pairs = zip(inner, up[slot].float().split(parts), strict=True)
            added = torch.cat([F.linear(*pair) for pair in pairs], dim=-1)
            total = torch.where((index == slot)[:, None], total + added, total)
        return total.to(y.dtype)

    return run
