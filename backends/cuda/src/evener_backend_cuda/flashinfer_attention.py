"""The state provider "flashinfer": attention by FlashInfer (Ye et al. 2025).

Its wrapper takes a step's lengths and pages once (``plan``, on the host) and then runs for every layer (``run``). We
use only the wrapper for queries of any length: with one query per request it launches the same kernel as the library's
decode wrapper with tensor cores, so only one kernel has to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener_backend_cuda.library import FLASHINFER
from evener_backend_parts.paged_library import PagedLibrary, TokenSlots, window_left_of

_Ints: TypeAlias = "np.ndarray[Any, Any]"
#: Workspace that FlashInfer recommends for partial results, and that each of its wrappers needs for a plan.
_PARTIAL, _PLAN = 128 << 20, (8 << 20) + (128 << 10)
#: Plans of one group that may be in flight: each is copied from a pinned buffer of its wrapper.
_RING = 2


@dataclass(frozen=True)
class InferMeta:
    """One step of a group. ``wrapper`` is planned; None where no request has tokens."""

    token_slots: TokenSlots
    wrapper: Any


@dataclass
class _Ring:
    """The wrappers of one group, and for each the event after its last plan's copy."""

    wrappers: list[Any]
    copied: list[Any] = field(default_factory=lambda: [None] * _RING)
    turn: int = 0


class FlashInferState(PagedLibrary):
    """Pages of any size. Plans are made on the host, so steps are not captured."""

    name = layout = "flashinfer"
    graph = "never"
    library = FLASHINFER
    head_dims = (64, 128, 256)
    sizes = (16, 32, 64)

    def __init__(self) -> None:
        self._partial: torch.Tensor | None = None
        self._rings: dict[Any, _Ring] = {}

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> InferMeta:
        token_slots = TokenSlots.of(step, block_size)
        # A request without tokens has no place among the queries, and would have no last page.
        rows = [row for row, count in enumerate(step.host_query_lens) if count]
        if not rows:
            return InferMeta(token_slots, None)
        lengths = np.array([step.host_kv_lens[row] for row in rows], dtype=np.int32)
        pages = _indptr(-(-lengths // block_size))
        where = step.block_table.device
        cells = torch.from_numpy(_page_table_indices(np.array(rows), pages, step.block_table.shape[1])).to(where)
        ring = self._ring((spec, attention, block_size), where)
        turn = ring.turn = (ring.turn + 1) % _RING
        if ring.copied[turn] is not None:
            ring.copied[turn].synchronize()
        wrapper, key = ring.wrappers[turn], spec.tensors[0]
        wrapper.plan(
            qo_indptr=torch.from_numpy(_indptr([step.host_query_lens[row] for row in rows])),
            paged_kv_indptr=torch.from_numpy(pages), paged_kv_indices=step.block_table.flatten()[cells],
            paged_kv_last_page_len=torch.from_numpy((lengths - 1) % block_size + 1),
            num_qo_heads=attention.heads, num_kv_heads=key.shape[0], head_dim_qk=key.shape[1], page_size=block_size,
            causal=True, sm_scale=attention.scale, window_left=window_left_of(spec), logits_soft_cap=attention.softcap,
            q_data_type=getattr(torch, attention.dtype), kv_data_type=getattr(torch, key.dtype),
        )  # fmt: skip
        if where.type == "cuda":
            ring.copied[turn] = ring.copied[turn] or torch.cuda.Event()
            ring.copied[turn].record()
        return InferMeta(token_slots, wrapper)

    def _ring(self, group: Any, where: torch.device) -> _Ring:
        if self._partial is None:
            self._partial = torch.empty(_PARTIAL, dtype=torch.uint8, device=where)
        if group not in self._rings:
            made = self.library.load().BatchPrefillWithPagedKVCacheWrapper
            self._rings[group] = _Ring(
                [made(float_workspace_buffer=self._partial, kv_layout="NHD", backend="fa2") for _ in range(_RING)]
            )
        return self._rings[group]

    def attend(
        self, views: Any, meta: InferMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if meta.wrapper is None:
            return torch.empty_like(query)
        found: torch.Tensor = meta.wrapper.run(q=query.contiguous(), paged_kv_cache=views)
        return found

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        del spec, attention, max_tokens, max_kv
        return _PARTIAL + _RING * _PLAN


def _indptr(counts: Sequence[int] | _Ints) -> _Ints:
    """int32 [n + 1]: 0, then the cumulative sums of the counts."""
    out: _Ints = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def _page_table_indices(rows: _Ints, pages: _Ints, columns: int) -> _Ints:
    """Indices of the page ids of ``rows`` in a flattened block table: for each row as many as it has pages."""
    cells: _Ints = np.repeat(rows * columns - pages[:-1], np.diff(pages)) + np.arange(pages[-1])
    return cells
