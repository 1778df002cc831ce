"""Norms, computed in float32."""

from __future__ import annotations

import torch

from evener.contracts.ops import OpFunction, Static, Use


def rms_norm(static: Static, use: Use) -> OpFunction:
    eps, offset = static["eps"], static["offset"]

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = wide * (weight.float() + offset)
        return wide.to(x.dtype)

    return run


def add_rms_norm(static: Static, use: Use) -> OpFunction:
    norm = rms_norm(static, use)

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual  # in the wider dtype of the two
        return norm(total, weight).to(x.dtype), total

    return run


def layer_norm(static: Static, use: Use) -> OpFunction:
    eps = static["eps"]

    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide: torch.Tensor = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        wide = wide if weight is None else wide * weight.float()
        return (wide if bias is None else wide + bias.float()).to(x.dtype)

    return run
