"""Attention by its definition, over one request's tokens as they were written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.contracts.state import AttentionSpec, StateSpec


def attention(
    spec: StateSpec, how: AttentionSpec, tokens: Sequence[torch.Tensor], query: torch.Tensor,
    sinks: torch.Tensor | None = None, chosen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """float32 [queries, heads, value_dim] of the last tokens' queries.

    Args:
        tokens: each tensor of the spec, [length, *shape].
        chosen: positions that each query reads, -1 for none.
    """
    parts = [t.double() for t in tokens]
    if spec.kind == "latent":
        keys, values = torch.cat(parts, dim=-1)[:, None], parts[0][:, None]
    else:
        keys, values = parts
    length, count = len(keys), len(query)
    group = how.heads // keys.shape[1]
    heads = torch.arange(how.heads) // group
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys[:, heads]) * how.scale
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.slopes:
        far = (torch.arange(length - count, length)[:, None] - torch.arange(length)).double()
        scores = scores - torch.tensor(how.slopes, dtype=torch.float64)[:, None, None] * far
    seen = torch.zeros(count, length, dtype=torch.bool)
    for row in range(count):
        at = length - count + row
        if chosen is not None:
            seen[row, [n for n in chosen[row].tolist() if n >= 0]] = True
        else:
            seen[row, max(0, spec.first_attended(at)) : at + 1] = True
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().cpu()[:, None, None].expand(-1, count, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khv->qhv", weights, values[:, heads]).float()
