"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.contracts.ops import OpFunction, Use


def route(static: Mapping[str, Any], use: Use) -> OpFunction:
    top, sigmoid, renormalize, scale = (
        static["top"],
        static["scoring"] == "sigmoid",
        static["renormalize"],
        static["scale"],
    )

    def run(logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        wanted = scores if bias is None else scores + bias
        # A stable descending sort keeps equal scores in the order of their ids; topk does not promise that.
        ids = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        weights = scores.gather(1, ids)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32), weights * scale

    return run
