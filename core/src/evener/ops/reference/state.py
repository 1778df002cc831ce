"""The reference state provider: plain paged keys and values, attended one request at a time in float32. Any device, any
lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateStep


@dataclass(frozen=True)
class _Meta:
    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    block_size: int
    blocks: torch.Tensor
    offsets: torch.Tensor


def cut_page(storage: torch.Tensor, spec: StateSpec, block_size: int) -> tuple[torch.Tensor, ...]:
    """The spec's tensors as views of a pool [blocks, page_bytes]: [blocks, block_size, *shape], or [blocks, *shape] for
    rows."""
    views, start = [], 0
    count = block_size if spec.per == "token" else 1
    for tensor in spec.tensors:
        stop = start + count * tensor.nbytes
        flat = storage[:, start:stop].view(getattr(torch, tensor.dtype))
        shape = (block_size, *tensor.shape) if spec.per == "token" else tensor.shape
        views.append(flat.unflatten(1, shape))
        start = stop
    return tuple(views)


class ReferenceState(StateProvider):
    """Keys and values as the canonical layout has them."""

    name = "reference"
    layout = "reference"
    kinds = frozenset({"full", "window"})
    priority = -1000
    batch_invariant = True

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (16, 32, 64, 128)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * (block_size if spec.per == "token" else 1)

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> tuple[torch.Tensor, ...]:
        return cut_page(storage, spec, block_size)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> _Meta:
        slots = step.slot_mapping
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        return _Meta(step, spec, attention, block_size, blocks.long(), (slots - blocks * block_size).long())

    def write(self, views: Any, meta: _Meta, *values: torch.Tensor) -> None:
        for view, value in zip(views, values, strict=True):
            view[meta.blocks, meta.offsets] = value.to(view.dtype)

    def attend(self, views: Any, meta: _Meta, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        keys, values = views
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
        start = 0
        for row, (count, length) in enumerate(zip(meta.step.host_query_lens, meta.step.host_kv_lens, strict=True)):
            if count:
                out[start : start + count] = self._attend_one(
                    keys, values, meta, row, query[start : start + count], length, sinks
                )
            start += count
        return out

    def _attend_one(
        self, keys: torch.Tensor, values: torch.Tensor, meta: _Meta, row: int, query: torch.Tensor, length: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        count, window, size = query.shape[0], meta.spec.window, meta.block_size
        first = 0 if window is None else max(0, length - count - window + 1) // size
        ids = meta.step.block_table[row, first : -(-length // size)].long()
        k = keys[ids].flatten(0, 1)[: length - first * size].float()
        v = values[ids].flatten(0, 1)[: length - first * size].float()
        group = query.shape[1] // k.shape[1]
        q = query.float().unflatten(1, (k.shape[1], group))
        scores = torch.einsum("qhgd,khd->hgqk", q, k) * meta.attention.scale
        if meta.attention.softcap:
            scores = torch.tanh(scores / meta.attention.softcap) * meta.attention.softcap
        at = torch.arange(length - count, length, device=query.device)[:, None]
        to = torch.arange(first * size, length, device=query.device)[None]
        hidden = (to > at) if window is None else (to > at) | (to <= at - window)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            extra = sinks.float().view(k.shape[1], group, 1, 1).expand(-1, -1, count, 1)
            weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2).to(query.dtype)

    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        for view in views:
            view[target] = view[source]

    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(view[blocks] for view in views)

    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        for view, value in zip(views, values, strict=True):
            view[blocks] = value.to(view.dtype)
