"""The state provider "gcu.paged": keys and values in the vendor's layout.

A block of keys is [kv_heads, head_dim / x, block_size, x] with x elements in 16 bytes, a block of values [kv_heads,
head_dim, block_size]. Steps with one new token for each request use the vendor's paged attention; other steps copy a
request's blocks to the canonical layout and compute in plain torch.

Quantized state is int8. How the vendor's ops round, and whether they multiply or divide by a scale, is not documented.
So they get whole numbers to write and scales of 1, and scales are factors on the scores and on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.quant import DTYPE_BYTES
from evener.contracts.quantized.state import QuantizedState
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener.state_pages.elements import dequantize, quantize
from evener_backend_gcu.device import ALIGNMENT
from evener_backend_parts.by_request import attend_by_request, workspace
from evener_backend_parts.vendor_ops import VendorOps
from evener_backend_parts.vllm_ops import aligned

ATTENTION, WRITE = "_C::paged_attention_v1", "_C_cache_ops::reshape_and_cache"
BLOCK = 64
#: Head lengths of the vendor's kernels.
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
#: The vendor's stack takes another op for longer sequences.
LONGEST = 8192
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class PagedMeta:
    """Metadata of one step. ``decode``: the vendor's attention serves it."""

    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    decode: bool


@dataclass(frozen=True)
class Pages:
    """One layer's blocks. Of quantized state also the scales of keys and values, float32 [heads] each, and the largest
    scale of keys, which is a factor on all scores. ``dtype``: of the numbers that are stored."""

    keys: torch.Tensor
    values: torch.Tensor
    dtype: torch.dtype
    scales: tuple[torch.Tensor, ...] = ()
    key_scale: float = 1.0

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.keys, self.values

    def stored(self, numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Numbers [..., heads, dim] as elements."""
        if not self.scales:
            return [given.to(view.dtype) for given, view in zip(numbers, self.both, strict=True)]
        return [quantize(given, scale, torch.int8) for given, scale in zip(numbers, self.scales, strict=True)]


class GcuPaged(AttentionProvider, QuantizedState):
    """Blocks of 64 tokens. The vendor's ops want each cache in one piece, so it allocates them itself."""

    name = layout = "gcu.paged"
    kinds = frozenset({"full", "window"})
    priority = 100
    graph = "uniform_decode"
    owns_memory = True
    scaled = frozenset({"int8"})
    # S60 has no 8-bit floats, and the vendor's own stack stores int8 there, too.
    replaced = MappingProxyType({"float8_e4m3fn": "int8", "float8_e5m2": "int8"})

    def __init__(self, ops: VendorOps) -> None:
        self._ops = ops

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        if spec.per != "token" or len(spec.tensors) != 2 or spec.tensors[0].shape != spec.tensors[1].shape:
            return "stores one key and one value of equal shape per token, nothing else"
        key = spec.tensors[0]
        dtypes = {tensor.wide or tensor.dtype for tensor in spec.tensors}
        if dtypes != {attention.dtype} or attention.dtype not in _DTYPES:
            return f"stores and computes in {', '.join(_DTYPES)}, not in {attention.dtype} over {key.dtype}"
        if key.shape[1] not in HEAD_DIMS:
            return f"has kernels for heads of {', '.join(map(str, HEAD_DIMS))} elements, not {key.shape[1]}"
        return self._ops.refusal(WRITE, device.variant) or self._ops.refusal(ATTENTION, device.variant)

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (BLOCK,)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * block_size

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        heads, dim = spec.tensors[0].shape
        kind, group = getattr(torch, spec.tensors[0].dtype), 16 // int(DTYPE_BYTES[spec.tensors[0].dtype])
        blocks = storage.shape[0]
        keys = torch.zeros(blocks, heads, dim // group, block_size, group, dtype=kind, device=storage.device)
        values = torch.zeros(blocks, heads, dim, block_size, dtype=kind, device=storage.device)
        return Pages(keys, values, getattr(torch, spec.tensors[0].wide or spec.tensors[0].dtype))

    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> Any:
        plain = self.bind(storage, spec, block_size)
        return replace(plain, scales=tuple(scales), key_scale=float(scales[0].max()))

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> PagedMeta:
        plain = spec.kind == "full" and not attention.sinks
        plain = plain and attention.softcap is None and attention.slopes is None
        one = step.max_query == 1 and step.tokens == step.requests
        return PagedMeta(step, spec, attention, plain and one and step.max_kv <= LONGEST)

    def write(self, views: Any, meta: PagedMeta, *values: torch.Tensor) -> None:
        if not values[0].shape[0]:
            return
        # The op takes numbers in the compute dtype; elements of int8 are whole numbers in each.
        key, value = (aligned(each.to(views.dtype), ALIGNMENT) for each in views.stored(values))
        self._ops.function(WRITE)(
            key=key, value=value, key_cache=views.keys, value_cache=views.values, slot_mapping=meta.step.slot_mapping,
            kv_cache_dtype="int8" if views.scales else "auto", k_scale=1.0, v_scale=1.0, k_zero=0.0, v_zero=0.0,
        )  # fmt: skip

    def attend(
        self, views: Any, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not query.shape[0]:
            return torch.empty_like(query)
        if meta.decode:
            return self._decode(views, meta, query)
        return attend_by_request(
            partial(self._numbers, views), meta.step, meta.spec, meta.attention, BLOCK, query, sinks
        )

    def _decode(self, views: Any, meta: PagedMeta, query: torch.Tensor) -> torch.Tensor:
        step, kv_heads, factor = meta.step, views.keys.shape[1], views.key_scale
        if views.scales:
            query = _times_heads(query, views.scales[0] / factor)
        query = aligned(query, ALIGNMENT)
        out = torch.empty_like(query)
        self._ops.function(ATTENTION)(
            out=out, query=query, key_cache=views.keys, value_cache=views.values, num_kv_heads=kv_heads,
            scale=meta.attention.scale * factor, block_tables=step.block_table, seq_lens=step.kv_lens, block_size=BLOCK,
            max_seq_len=step.max_kv, alibi_slopes=None, kv_cache_dtype="int8" if views.scales else "auto", k_scale=1.0,
            v_scale=1.0, tp_rank=0, blocksparse_local_blocks=0, blocksparse_vert_stride=0, blocksparse_block_size=64,
            blocksparse_head_sliding_step=0, k_zero=0.0, v_zero=0.0, out_scales=None, query_scales=None,
        )  # fmt: skip
        return _times_heads(out, views.scales[1]) if views.scales else out

    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        for view in views.both:
            view.index_copy_(0, target.to(torch.int64), view.index_select(0, source))

    def _numbers(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Blocks in the canonical layout; of quantized state in float32."""
        keys, values = (view.index_select(0, blocks) for view in views.both)
        found = keys.permute(0, 3, 1, 2, 4).flatten(3), values.permute(0, 3, 1, 2).contiguous()
        if not views.scales:
            return found
        return tuple(dequantize(part, scale) for part, scale in zip(found, views.scales, strict=True))

    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.to(views.dtype) for part in self._numbers(views, blocks))

    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        keys, others = views.stored(values)
        parts = keys.unflatten(3, (-1, views.keys.shape[-1])).permute(0, 2, 3, 1, 4), others.permute(0, 2, 3, 1)
        for view, given in zip(views.both, parts, strict=True):
            view.index_copy_(0, blocks.to(torch.int64), given.contiguous())

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # Of quantized state the new keys and values, divided and as elements; factors on queries and on the result.
        (heads, dim), more = spec.tensors[0].shape, 0
        if spec.tensors[0].wide is not None:
            more = 12 * max_tokens * dim * (2 * heads + attention.heads)
        return workspace(spec, attention, max_tokens, max_kv) + more


def _times_heads(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] times factors [kv_heads] of each group of heads, in the dtype of x."""
    each = factors.repeat_interleave(x.shape[1] // factors.shape[0])
    return (x.float() * each[:, None]).to(x.dtype)
