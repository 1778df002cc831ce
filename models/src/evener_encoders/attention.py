"""Attention within whole texts, by torch: one text after another, so that none reads another's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener.errors import ArchitectureError
from evener_encoders.whole import KIND, WholeTextProvider

#: With a window, so many queries at a time read the keys around them: memory grows with the window, not the text.
_QUERIES = 512


@dataclass(frozen=True)
class _Meta:
    counts: Sequence[int]
    scale: float
    window: int | None
    #: The masks of pieces of texts that have a window; equal pieces share one.
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)


class WholeTextAttention(WholeTextProvider):
    """Nothing is stored: blocks are empty, and views of them None."""

    name = layout = "encoders.whole"
    kinds = frozenset({KIND})
    priority = -1000
    batch_invariant = True

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        plain = attention.algorithm == "softmax" and not (attention.sinks or attention.softcap or attention.slopes)
        return None if plain and not spec.tensors else "computes only softmax, without sinks, soft cap and biases"

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (16, 32, 64, 128, 256)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return 1  # a pool has no empty pages

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> None:
        return None

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> _Meta:
        if list(step.host_query_lens) != list(step.host_kv_lens):
            raise ArchitectureError("a step has a part of a text, but an encoder computes it whole; tell its authors")
        return _Meta(step.host_query_lens, attention.scale, spec.window)

    def attend(self, meta: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        texts = zip(*(part.split(list(meta.counts)) for part in (query, key, value)), strict=True)
        return torch.cat([_attend(meta, *text) for text in texts])

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        row = attention.heads * attention.head_dim * torch.empty(0, dtype=getattr(torch, attention.dtype)).itemsize
        pieces = -(-max_kv // _QUERIES) if spec.window is not None else 0
        masks = (2 * pieces and 3) * _QUERIES * (_QUERIES + 2 * (spec.window or 0))
        # The results of all texts, then joined; copies of one text's query, key and value.
        return row * (2 * max_tokens + 4 * max_kv) + masks


def _attend(meta: _Meta, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    length, window = len(query), meta.window
    if window is None or length <= window + 1:
        return _softmax(query, key, value, None, meta.scale)
    parts = []
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        first, last = max(0, start - window), min(length, stop + window)
        mask = _mask(meta, stop - start, last - first, start - first, query.device)
        parts.append(_softmax(query[start:stop], key[first:last], value[first:last], mask, meta.scale))
    return torch.cat(parts)


def _mask(meta: _Meta, queries: int, keys: int, offset: int, device: torch.device) -> torch.Tensor:
    """bool [queries, keys], True where a key is read: query i is at the place of key ``i + offset``."""
    assert meta.window is not None, "texts without a window have no mask"
    found = meta.masks.get((queries, keys, offset))
    if found is None:
        at, to = torch.arange(queries, device=device)[:, None] + offset, torch.arange(keys, device=device)
        found = meta.masks[queries, keys, offset] = (at - to).abs() <= meta.window
    return found


def _softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[queries, heads, head_dim], from [queries or keys, heads, head_dim]."""
    # Copies, because some of torch's kernels for this read unaligned rows at a wrong address.
    even = torch.contiguous_format
    q, k, v = (part.transpose(0, 1)[None].clone(memory_format=even) for part in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)
