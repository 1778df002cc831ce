"""State of 310P: pages of 128 tokens in the format FRACTAL_NZ, which that chip's attention reads.

A page of keys is [heads * D / 16, 128, 16]: sixteen elements of every token lie together. The kernels are those of
Huawei's transformer library (NNAL). Steps with one new token for each request use its paged attention; others copy a
request's pages to the canonical layout and compute in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener_backend_ascend import calls
from evener_backend_ascend.chip import refusal
from evener_backend_parts.by_request import attend_by_request, workspace

#: Elements of a token that lie together.
_TOGETHER = 16


@dataclass(frozen=True)
class BlockedPages:
    """``keys`` and ``values``, each [blocks, heads * D / 16, 128, 16], of a group with so many key heads."""

    keys: torch.Tensor
    values: torch.Tensor
    heads: int

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.keys, self.values


@dataclass(frozen=True)
class BlockedMeta:
    """One step of a group. ``decode``: the vendor's attention serves it."""

    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    decode: bool


class BlockedState(AttentionProvider):
    """Keys and values by ``_npu_reshape_and_cache`` and ``_npu_paged_attention``, in float16."""

    name = layout = "ascend.blocked"
    kinds = frozenset({"full"})
    # Above the provider for the newer chips, so that its reason is the one that is read.
    priority = 110
    graph = "never"
    owns_memory = True
    batch_invariant = False

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if (why := refusal(device.variant, "_npu_reshape_and_cache", "_npu_paged_attention")) is not None:
            return why
        if not calls.has_transformer_library():
            return (
                "Huawei's transformer library is not loaded; install NNAL and type: "
                "source /usr/local/Ascend/nnal/atb/set_env.sh"
            )
        if spec.per != "token" or len(spec.tensors) != 2 or spec.tensors[0].shape != spec.tensors[1].shape:
            return "stores one key and one value of equal shape per token, nothing else"
        (heads, size), dtypes = spec.tensors[0].shape, {tensor.dtype for tensor in spec.tensors}
        if dtypes != {"float16"} or attention.dtype != "float16":
            return f"stores and computes in float16, not in {attention.dtype} over {spec.tensors[0].dtype}"
        if size % _TOGETHER or size > 256:
            return f"has no kernel for keys of {size} elements"
        if attention.heads % heads:
            return f"has no kernel for {attention.heads} query heads on {heads} key heads"
        if attention.sinks or attention.softcap or attention.slopes is not None:
            return "has neither sinks nor a soft cap nor slopes"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (calls.PAGE,)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * block_size

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        heads, size = spec.tensors[0].shape
        shape = storage.shape[0], heads * size // _TOGETHER, block_size, _TOGETHER
        keys, values = (
            calls.as_fractal_nz(torch.zeros(shape, dtype=torch.float16, device=storage.device)) for _ in range(2)
        )
        return BlockedPages(keys, values, heads)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> BlockedMeta:
        return BlockedMeta(step, spec, attention, step.max_query == 1 and step.tokens == step.requests)

    def write(self, views: Any, meta: BlockedMeta, *values: torch.Tensor) -> None:
        if values[0].shape[0]:
            key, value = (part.to(torch.float16) for part in values)
            keys, pages = views.both
            calls.write_blocked(key, value, keys, pages, meta.step.slot_mapping)

    def attend(
        self, views: Any, meta: BlockedMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not query.shape[0]:
            return torch.empty_like(query)
        if not meta.decode:
            export = partial(self.export_blocks, views)
            return attend_by_request(export, meta.step, meta.spec, meta.attention, calls.PAGE, query, sinks)
        return calls.blocked_attention(
            query, *views.both, kv_heads=views.heads, scale=meta.attention.scale, table=meta.step.block_table,
            kv_lens=meta.step.kv_lens, longest=meta.step.max_kv,
        )  # fmt: skip

    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        for view in views.both:
            view.index_copy_(0, target.to(torch.int64), view.index_select(0, source))

    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pages = (view.index_select(0, blocks).transpose(1, 2).flatten(2) for view in views.both)
        return tuple(page.unflatten(2, (views.heads, -1)) for page in pages)

    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        for view, given in zip(views.both, values, strict=True):
            pages = given.flatten(2).unflatten(2, (-1, _TOGETHER)).transpose(1, 2)
            view.index_copy_(0, blocks.to(torch.int64), pages.to(view.dtype).contiguous())

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        return workspace(spec, attention, max_tokens, max_kv)
