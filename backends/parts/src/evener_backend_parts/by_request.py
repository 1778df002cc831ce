"""Attention of one request after another in plain torch, for state in a layout that only a vendor's kernel reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener.ops.reference.state import ReferenceState

_REFERENCE = ReferenceState()


def attend_by_request(
    export: Callable[[torch.Tensor], Any], step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int,
    query: torch.Tensor, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What the reference computes for query [T, heads, D].

    Args:
        export: takes block ids and returns these blocks in the canonical layout. It is called once for each request, so
            that only one request's blocks are copied at a time.
    """
    out, start = torch.empty_like(query), 0
    for row, (count, length) in enumerate(zip(step.host_query_lens, step.host_kv_lens, strict=True)):
        if count:
            blocks = step.block_table[row, : -(-length // block_size)]
            table = torch.arange(blocks.shape[0], dtype=torch.int32, device=query.device)[None]
            alone = replace(step.rows(row, row + 1), block_table=table)
            inner = _REFERENCE.prepare(alone, spec, attention, block_size)
            out[start : start + count] = _REFERENCE.attend(export(blocks), inner, query[start : start + count], sinks)
        start += count
    return out


def workspace(spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
    """Bytes that ``attend_by_request`` takes at its peak, with the copies that ``export`` makes."""
    # One request's keys and values in float32 for all heads, as copied and as computed with; its queries and scores.
    heads, size = spec.tensors[0].shape
    each = 4 * size * (heads + attention.heads) + 3 * max_tokens * attention.heads
    return 4 * (max_kv * each + max_tokens * size * attention.heads)
