"""The reference state provider: pages in the canonical layout, for every built-in kind. It computes one request at a
time in float32, on any device and for any lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import (
    AttentionSpec,
    IndexProvider,
    Piece,
    RecurrentProvider,
    SparseLatentProvider,
    StateSpec,
    StateStep,
    StoredStateProvider,
)
from evener.ops.reference.recurrence import gated_delta
from evener.state_pages.elements import QuantizedPages


@dataclass(frozen=True)
class _Meta:
    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    block_size: int
    blocks: torch.Tensor
    offsets: torch.Tensor

    def requests(self) -> Iterator[tuple[int, int, int, int]]:
        """For each request with tokens: its row, its first token in the step, how many it adds, and its length."""
        start = 0
        for row, (count, length) in enumerate(zip(self.step.host_query_lens, self.step.host_kv_lens, strict=True)):
            if count:
                yield row, start, count, length
            start += count


def cut_page(storage: torch.Tensor, spec: StateSpec, block_size: int) -> tuple[torch.Tensor, ...]:
    """The spec's tensors as views of a pool [blocks, page_bytes]: [blocks, block_size, *shape], or [blocks, *shape] for
    state per request."""
    views, start = [], 0
    count = block_size if spec.per == "token" else 1
    for tensor in spec.tensors:
        stop = start + count * tensor.nbytes
        flat = storage[:, start:stop].view(getattr(torch, tensor.dtype))
        shape = (block_size, *tensor.shape) if spec.per == "token" else tensor.shape
        views.append(flat.unflatten(1, shape))
        start = stop
    return tuple(views)


class PlainPages(StoredStateProvider):
    """State in the canonical layout: the base of providers that differ only in how they read it."""

    layout = "reference"
    priority = -1000
    batch_invariant = drafts = True

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (16, 32, 64, 128)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * (block_size if spec.per == "token" else 1)

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        return cut_page(storage, spec, block_size)

    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        for view in views:
            view[target] = view[source]

    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(view[blocks].to(view.dtype) for view in views)

    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        for view, value in zip(views, values, strict=True):
            view[blocks] = value.to(view.dtype)


class ReferenceState(QuantizedPages, PlainPages, SparseLatentProvider, IndexProvider, RecurrentProvider):
    """Serves every built-in kind of state, by the definitions in ``evener.contracts.state``."""

    name = "reference"
    kinds = frozenset({"full", "window", "chunk", "latent", "index", "recurrent"})

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        known = ("gated_delta",) if spec.kind == "recurrent" else ("softmax",)
        return None if attention.algorithm in known else f"does not compute {attention.algorithm}"

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> _Meta:
        blocks = torch.div(step.slot_mapping, block_size, rounding_mode="floor")
        return _Meta(step, spec, attention, block_size, blocks.long(), (step.slot_mapping - blocks * block_size).long())

    def write(self, views: Any, meta: _Meta, *values: torch.Tensor) -> None:
        for view, value in zip(views, values, strict=True):
            view[meta.blocks, meta.offsets] = value.to(view.dtype)

    def attend(self, views: Any, meta: _Meta, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._attend(views, meta, query, sinks, None)

    def attend_chosen(self, views: Any, meta: _Meta, query: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self._attend(views, meta, query, None, chosen)

    def _attend(
        self, views: Any, meta: _Meta, query: torch.Tensor, sinks: torch.Tensor | None, chosen: torch.Tensor | None
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], views[0 if meta.spec.kind == "latent" else 1].shape[-1])
        for row, start, count, length in meta.requests():
            spec, size = meta.spec, meta.block_size
            first = max(0, spec.first_attended(length - count)) // size * size
            keys, values = _keys_and_values(_read(views, meta, row, first, length), spec)
            at = torch.arange(length - count, length, device=query.device)[:, None]
            to = torch.arange(first, length, device=query.device)[None]
            hidden = (to > at) | (to < spec.first_attended(at))
            if chosen is not None:
                hidden = _not_chosen(chosen[start : start + count], length)
            part = query[start : start + count]
            out[start : start + count] = _softmax(part, keys, values, at - to, hidden, meta.attention, sinks)
        return out

    def pieces(self, views: Any, meta: _Meta, limit: int) -> Iterator[Piece]:
        for row, start, count, length in meta.requests():
            for first in range(0, length, limit):
                tensors = _read(views, meta, row, first, min(first + limit, length))
                yield Piece(start, start + count, length - count - first, tensors)

    def select(self, views: Any, meta: _Meta, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        top = meta.attention.top
        assert top is not None, "an index has top"
        out = torch.full((query.shape[0], top), -1, dtype=torch.int32, device=query.device)
        for row, start, count, length in meta.requests():
            (keys,) = _read(views, meta, row, 0, length)
            found = torch.einsum("thd,kd->thk", query[start : start + count].float(), keys.float()).relu()
            scores = torch.einsum("thk,th->tk", found, weights[start : start + count].float())
            at = torch.arange(length - count, length, device=query.device)[:, None]
            scores = scores.masked_fill(torch.arange(length, device=query.device) > at, -math.inf)
            order = scores.sort(dim=-1, descending=True, stable=True)
            named = order.indices.masked_fill(order.values == -math.inf, -1)[:, :top]
            out[start : start + count, : named.shape[1]] = named.to(torch.int32)
        return out

    def advance(self, views: Any, meta: Any, *inputs: torch.Tensor) -> torch.Tensor:
        mixed, filters, decay, beta = inputs
        table, size = meta.step.block_table.long(), meta.block_size
        every = meta.spec.every or size
        out: list[torch.Tensor] = []
        for row, start, count, length in meta.requests():
            done = length - count
            kept = (meta.step.host_kept_lens or meta.step.host_kv_lens)[row]
            rows = [view.index_select(0, table[row, (max(done, 1) - 1) // size, None])[0] for view in views]
            conv, delta = rows if done else [torch.zeros_like(r) for r in rows]
            while done < length:
                stop = min(length if done >= kept else kept, (done // every + 1) * every)
                tokens = slice(start + done - length + count, start + stop - length + count)
                found, conv, delta = gated_delta(conv, delta, mixed[tokens], filters, decay[tokens], beta[tokens])
                out.append(found)
                for view, new in zip(views, (conv, delta), strict=True) if stop <= kept else ():
                    view.index_copy_(0, table[row, (stop - 1) // size, None], new[None].to(view.dtype))
                done = stop
        return torch.cat(out)


def _read(views: Any, meta: _Meta, row: int, first: int, stop: int) -> tuple[torch.Tensor, ...]:
    """Tokens ``first`` to ``stop`` of one request, for each tensor [tokens, *shape]."""
    size = meta.block_size
    column = first // size
    ids = meta.step.block_table[row, column : -(-stop // size)].long()
    return tuple(view[ids].flatten(0, 1)[first - column * size : stop - column * size] for view in views)


def _keys_and_values(tensors: Sequence[torch.Tensor], spec: StateSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, kv_heads, dim] each, in float32."""
    if spec.kind == "latent":
        latent, rope = (t.float()[:, None] for t in tensors)
        return torch.cat((latent, rope), dim=-1), latent
    keys, values = tensors
    return keys.float(), values.float()


def _not_chosen(chosen: torch.Tensor, length: int) -> torch.Tensor:
    """bool [T, length], False at the chosen positions; -1 is ignored."""
    hidden = torch.ones(chosen.shape[0], length + 1, dtype=torch.bool, device=chosen.device)
    return hidden.scatter_(1, torch.where(chosen < 0, length, chosen).long(), False)[:, :length]


def _softmax(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, behind: torch.Tensor, hidden: torch.Tensor,
    attention: AttentionSpec, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``behind`` [T, tokens]: query position minus key position; ``hidden`` bool [T, tokens]: keys that are masked."""
    group = query.shape[1] // k.shape[1]
    q = query.float().unflatten(1, (k.shape[1], group))
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * attention.scale
    if attention.softcap:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    if attention.slopes:
        scores = scores - torch.tensor(attention.slopes, device=k.device).view(k.shape[1], group, 1, 1) * behind
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        extra = sinks.float().view(k.shape[1], group, 1, 1).expand(-1, -1, query.shape[0], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2).to(query.dtype)
