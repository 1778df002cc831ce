"""State in pages of 128 tokens, as the vendor's fused attention reads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener.ops.reference.state import PlainPages, ReferenceState
from evener_backend_ascend import calls
from evener_backend_ascend.chip import LATENT, refusal

_HALVES = ("float16", "bfloat16")
_PAGED = ("npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score")
#: Sizes that the vendor documents for latent attention.
_LATENT_HEADS, _RANK, _ROPE, _MAX_QUERY = (32, 64, 128), 512, 64, 16


@dataclass(frozen=True)
class PagedMeta:
    """One step of a group. ``query_ends``: for each request the end of its tokens in the step."""

    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    query_ends: list[int]
    kv_lens: list[int]


def _own_pages(storage: torch.Tensor, spec: StateSpec, block_size: int) -> tuple[torch.Tensor, ...]:
    """For each tensor of the spec zeros [blocks, block_size, *shape]. The vendor's kernels take pages without gaps
    between them, so keys and values cannot share the pool's pages."""
    blocks, device = storage.shape[0], storage.device
    return tuple(
        torch.zeros(blocks, block_size, *t.shape, dtype=getattr(torch, t.dtype), device=device) for t in spec.tensors
    )


class PagedState(PlainPages, AttentionProvider):
    """Keys and values by ``npu_scatter_pa_kv_cache`` and ``npu_fused_infer_attention_score``."""

    name = layout = "ascend.paged"
    kinds = frozenset({"full", "window"})
    priority = 100
    graph = "uniform_decode"
    owns_memory = True
    batch_invariant = False

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if (why := refusal(device.variant, *_PAGED)) is not None:
            return why
        if spec.per != "token" or len(spec.tensors) != 2:
            return "stores one key and one value per token, nothing else"
        key, value = spec.tensors
        if attention.dtype not in _HALVES or {key.dtype, value.dtype} != {attention.dtype}:
            return f"stores and computes in {' or '.join(_HALVES)}, not in {attention.dtype} over {key.dtype}"
        if key.shape != value.shape or key.shape[1] % 16 or key.shape[1] > 512:
            return f"has no kernel for keys of {key.shape[1]} and values of {value.shape[1]} elements"
        if attention.heads % key.shape[0] or attention.heads // key.shape[0] > 64:
            return f"has no kernel for {attention.heads} query heads on {key.shape[0]} key heads"
        if key.shape[0] * key.shape[1] > 65535:
            return f"rows of {key.shape[0]} heads of {key.shape[1]} elements are too long"
        if attention.sinks or attention.softcap or attention.slopes is not None:
            return "has neither sinks nor a soft cap nor slopes"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (calls.PAGE,)

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        return _own_pages(storage, spec, block_size)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> PagedMeta:
        ends = list(itertools.accumulate(step.host_query_lens))
        return PagedMeta(step, spec, attention, ends, list(step.host_kv_lens))

    def write(self, views: Any, meta: PagedMeta, *values: torch.Tensor) -> None:
        key, value = (part.to(views[0].dtype) for part in values)
        if key.shape[0]:
            pages = views[0], views[1]
            calls.write_pages(key, value, *pages, meta.step.slot_mapping)

    def attend(
        self, views: Any, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not query.shape[0]:
            return torch.empty_like(query)
        keys, values = views
        return calls.attention(
            query, keys.flatten(2), values.flatten(2), kv_heads=keys.shape[2], scale=meta.attention.scale,
            table=meta.step.block_table, query_ends=meta.query_ends, kv_lens=meta.kv_lens, mask=self._mask,
            window=meta.spec.window,
        )  # fmt: skip

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # Copies of the query, the key and the value where they have gaps, and of the table.
        size = 2 * (attention.heads * attention.head_dim) + spec.nbytes + 8
        return max_tokens * (size + -(-max_kv // calls.PAGE) * 4)


class LatentState(ReferenceState):
    """Latents and rotated keys, each in memory of its own, because the vendor's kernel takes them as two tensors of
    pages without gaps. Steps of up to 16 tokens a request attend by ``npu_fused_infer_attention_score``; longer ones by
    the reference's arithmetic, and layers expand most of these themselves."""

    name = layout = "ascend.latent"
    kinds = frozenset({"latent"})
    priority = 100
    graph = "uniform_decode"
    owns_memory = True
    batch_invariant = False

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if (why := refusal(device.variant, "npu_scatter_pa_kv_cache", LATENT)) is not None:
            return why
        if attention.top is not None:
            return "attends to every earlier token, not to selected ones"
        if attention.sinks or attention.softcap or attention.slopes is not None:
            return "has neither sinks nor a soft cap nor slopes"
        latent, rope = spec.tensors
        if attention.dtype not in _HALVES or {latent.dtype, rope.dtype} != {attention.dtype}:
            return f"stores and computes in {' or '.join(_HALVES)}, not in {attention.dtype} over {latent.dtype}"
        if (latent.shape, rope.shape) != ((_RANK,), (_ROPE,)) or attention.heads not in _LATENT_HEADS:
            sizes = f"{attention.heads} heads, latents of {latent.shape[0]} and rotated keys of {rope.shape[0]}"
            return f"has a kernel for {_LATENT_HEADS} heads, {_RANK} and {_ROPE}, not for {sizes}"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (calls.PAGE,)

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        return _own_pages(storage, spec, block_size)

    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        latents, ropes = views
        latent, rope = (part.to(latents.dtype)[:, None] for part in values)
        if latent.shape[0]:
            calls.write_pages(latent, rope, latents.unsqueeze(2), ropes.unsqueeze(2), meta.step.slot_mapping)

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step = meta.step
        if step.max_query > _MAX_QUERY or not query.shape[0]:
            return super().attend(views, meta, query, sinks)
        latents, ropes = views
        content, turned = query.split([_RANK, _ROPE], dim=-1)
        return calls.attention(
            content, latents, latents, kv_heads=1, scale=meta.attention.scale, table=step.block_table,
            query_ends=list(itertools.accumulate(step.host_query_lens)), kv_lens=list(step.host_kv_lens),
            mask=self._mask, query_rope=turned, key_rope=ropes,
        )  # fmt: skip

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # Queries of latent length; where the reference attends, the scores of the longest request.
        return max_tokens * attention.heads * (_RANK + _ROPE) * 2 + max_tokens * attention.heads * max_kv * 8
