"""Attention with the interface of flash-attn (Dao 2023), version 2, which vendors' builds keep.

Steps with one new token for each request use ``flash_attn_with_kvcache``, which splits long sequences over the device;
other steps use ``flash_attn_varlen_func`` over the same pages. Lengths and tables are read on the device, so that
decode steps can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener_backend_parts.paged_library import PagedLibrary, TokenSlots, window_left_of


@dataclass(frozen=True)
class FlashMeta:
    """Metadata of one step. ``ends``: int32 [R + 1], cumulative lengths; None if each request has one new token."""

    step: StateStep
    token_slots: TokenSlots
    arguments: dict[str, Any]
    ends: torch.Tensor | None


class FlashAttention(PagedLibrary):
    """A backend's subclass sets ``name``, ``layout``, ``library`` and ``sizes``."""

    graph = "uniform_decode"
    head_dims = range(8, 257, 8)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> FlashMeta:
        left = window_left_of(spec)
        arguments = {
            "softmax_scale": attention.scale, "causal": True, "softcap": attention.softcap or 0.0,
            "window_size": (-1, -1) if left < 0 else (left, 0), "block_table": step.block_table,
        }  # fmt: skip
        ends = None
        if step.max_query != 1 or step.tokens != step.requests:
            ends = torch.zeros(step.requests + 1, dtype=torch.int32, device=step.kv_lens.device)
            ends[1:] = step.kv_lens.cumsum(0)
        return FlashMeta(step, TokenSlots.of(step, block_size), arguments, ends)

    def attend(
        self, views: Any, meta: FlashMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        keys, values = views
        library, step = self.library.load(), meta.step
        if not query.shape[0]:
            return torch.empty_like(query)
        query = query if query.stride(-1) == 1 else query.contiguous()
        if meta.ends is None:
            out: torch.Tensor = library.flash_attn_with_kvcache(
                q=query[:, None], k_cache=keys, v_cache=values, cache_seqlens=step.kv_lens, **meta.arguments
            )
            return out[:, 0]
        found: torch.Tensor = library.flash_attn_varlen_func(
            q=query, k=keys, v=values, cu_seqlens_q=step.query_start, cu_seqlens_k=meta.ends,
            max_seqlen_q=step.max_query, max_seqlen_k=step.max_kv, **meta.arguments,
        )  # fmt: skip
        return found
