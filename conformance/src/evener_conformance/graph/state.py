"""A paged state provider with fixed shapes. It reads everything on the device, so that steps can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener.ops.reference.state import ReferenceState

#: Most requests of a step that is computed as one with long state.
MOST_LONG = 4


@dataclass(frozen=True)
class MaskedMeta:
    """One step of a group, on the device.

    Attributes:
        blocks, offsets: int64 [T], where each token is written.
        rows: int64 [T], the request of each token.
        hidden: bool [T, C * block_size], positions that a token must not read.
        long: the step is computed as one with long state.
    """

    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    blocks: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor
    long: bool = False


class MaskedState(ReferenceState):
    """The reference's layout. A token gathers all blocks of its request, and masks what it must not read.

    Args:
        limit: tokens of state from which captured steps compute in another order, and want captures of their own; 0:
            all compute alike.

    Attributes:
        computed: int64 [2], how often ``attend`` of captured steps computed for short and for long state, replays
            included.
    """

    name = "graphs.paged"
    layout = "graphs.paged"
    priority = 10
    kinds = frozenset({"full", "window", "chunk"})
    graph = "any"
    batch_invariant = False

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self.computed = torch.zeros(2, dtype=torch.int64)

    def capture_limits(self, spec: StateSpec, attention: AttentionSpec, requests: int) -> Sequence[int]:
        return (self._limit,) if self._limit and requests <= MOST_LONG else ()

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        return "has neither sinks nor slopes" if attention.sinks or attention.slopes else None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (8, 16, 32)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        slots = step.slot_mapping
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        tokens = torch.arange(step.tokens, dtype=step.query_start.dtype, device=slots.device)
        rows = (tokens[:, None] >= step.query_start[None, 1:]).sum(-1)
        where = torch.arange(step.block_table.shape[1] * block_size, device=slots.device)[None]
        at = step.positions[:, None]
        hidden = (where > at) | (where < spec.first_attended(at))
        long = bool(self._limit) and step.captured and step.max_query == 1 and step.max_kv >= self._limit
        long = long and step.requests <= MOST_LONG  # as ``capture_limits`` says
        offsets = (slots - blocks * block_size).long()
        return MaskedMeta(step, spec, attention, blocks.long(), offsets, rows, hidden, long)

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        keys, values = views
        table = meta.step.block_table.long().index_select(0, meta.rows)
        k, v = (part[table].flatten(1, 2).float() for part in (keys, values))
        q = query.float().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("thgd,tkhd->thgk", q, k) * meta.attention.scale
        if meta.attention.softcap:
            scores = torch.tanh(scores / meta.attention.softcap) * meta.attention.softcap
        if meta.step.captured:
            self.computed[int(meta.long)].add_(1)
        hidden = meta.hidden
        if meta.long:  # the last tokens first
            scores, hidden, v = scores.flip(-1), hidden.flip(-1), v.flip(1)
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("thgk,tkhd->thgd", weights, v).flatten(1, 2).to(query.dtype)
