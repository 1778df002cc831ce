"""The state provider "cpu.paged": attention over pages in the layout that ``native/attention.h`` describes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.device import DeviceCapabilities
from evener.contracts.quant import DTYPE_BYTES
from evener.contracts.quantized.state import QuantizedState
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener.state_pages.elements import dequantize, quantize
from evener_backend_cpu.arguments import optional, require, require_indices
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.huge_pages import begin_small
from evener_backend_cpu.native_library import DTYPES, Geometry, Step
from evener_backend_cpu.stored_packing import KINDS

LAYOUT = "cpu.paged"
#: Longest head that the kernels have room for.
MAX_HEAD_DIM = 1024
_SPAN = 256
_ITEM_WORDS = 6


class PagedViews:
    """One layer's pages.

    Attributes:
        storage: uint8 [blocks, page_bytes].
        keys: [blocks, kv_heads, groups, head_dim / lanes, 16, lanes].
        values: [blocks, kv_heads, groups, 16 / lanes, value_dim, lanes].
        scales: of keys and of values, float32 [kv_heads] each; empty if state is not quantized.
    """

    def __init__(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor] = ()
    ) -> None:
        key, value = spec.tensors
        if storage.stride(1) != 1 or storage.shape[1] < block_size * spec.nbytes:
            raise ValueError(f"storage is {list(storage.shape)} with strides {list(storage.stride())}; a block of "
                             f"{block_size} tokens has {block_size * spec.nbytes} bytes")  # fmt: skip
        for scale, tensor in zip(scales, spec.tensors, strict=False):
            require(f"the scale of the {tensor.name}", scale, torch.float32, (tensor.shape[0],))
        self.storage, self.spec, self.block_size, self.scales = storage, spec, block_size, tuple(scales)
        dtype, lanes = getattr(torch, key.dtype), int(4 // DTYPE_BYTES[key.wide or key.dtype])
        (heads, d), dv, groups = key.shape, value.shape[1], block_size // 16
        cut = block_size * key.nbytes
        self.keys = storage[:, :cut].view(dtype).view(-1, heads, groups, d // lanes, 16, lanes)
        self.values = (
            storage[:, cut : cut + block_size * value.nbytes]
            .view(dtype)
            .view(-1, heads, groups, 16 // lanes, dv, lanes)
        )
        self._attention: AttentionSpec | None = None
        self._slopes = torch.empty(0)
        self._geometry = Geometry()

    def geometry(self, attention: AttentionSpec) -> Geometry:
        """The pages' geometry for the kernels; the same object while ``attention`` is the same object."""
        if attention is not self._attention:
            (kv_heads, d), dv = self.spec.tensors[0].shape, self.spec.tensors[1].shape[1]
            if attention.slopes and len(attention.slopes) != attention.heads:
                raise ValueError(f"{len(attention.slopes)} slopes for {attention.heads} heads")
            self._slopes = torch.tensor(attention.slopes or (), dtype=torch.float32)
            self._geometry = Geometry(
                attention.heads,
                kv_heads,
                d,
                dv,
                self.block_size,
                self.storage.stride(0),
                self.spec.window or 0,
                self.spec.kind == "chunk",
                self.storage.shape[0],
                KINDS[self.spec.tensors[0].dtype] if self.scales else 0,
                attention.scale,
                attention.softcap or 0.0,
                self.storage.data_ptr(),
                self._slopes.data_ptr() or None,
                *(scale.data_ptr() for scale in self.scales),
            )
            self._attention = attention
        return self._geometry


class PagedMeta:
    """One step of a group. Keeps the step's tensors alive while the kernels hold their addresses."""

    def __init__(self, step: StateStep, attention: AttentionSpec) -> None:
        self.attention, self._step = attention, step
        # Upper bound of the items of a plan: one per token, and the spans of every request.
        room = step.tokens + step.requests * 2 + sum(step.host_kv_lens) // _SPAN + 1
        self.room = room
        self._plan = torch.empty(room * _ITEM_WORDS, dtype=torch.int32)
        given = (step.slot_mapping, step.query_start, step.kv_lens, step.block_table)
        self._tensors = slots, query_start, kv_lens, table = [t.contiguous() for t in given]
        if table.dtype is not torch.int32 or table.shape[0] < step.requests:
            raise ValueError(f"the block table is {table.dtype} {list(table.shape)}; {step.requests} rows of int32 fit")
        address, wide = require_indices("slot_mapping", slots, step.tokens)
        self.struct = Step(
            step.tokens,
            step.requests,
            wide,
            table.stride(0),
            table.shape[1],
            0,
            0,
            0,
            address,
            require("query_start", query_start, torch.int32, (step.requests + 1,)),
            require("kv_lens", kv_lens, torch.int32, (step.requests,)),
            table.data_ptr(),
            self._plan.data_ptr(),
        )
        self.address = ctypes.addressof(self.struct)


class PagedState(AttentionProvider, QuantizedState):
    """Keys and values in vectors of 16 tokens. One call writes, one attends, for any mix of query lengths."""

    name = LAYOUT
    layout = LAYOUT
    kinds = frozenset({"full", "window", "chunk"})
    priority = 100
    batch_invariant = True
    scaled = frozenset(KINDS)

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        native = self._device.native
        if isinstance(native, Unavailable):
            return native.reason
        if attention.algorithm != "softmax":
            return f"does not compute {attention.algorithm}"
        if spec.per != "token" or len(spec.tensors) != 2:
            return "stores one key and one value per token, nothing else"
        key, value = spec.tensors
        if {key.wide or key.dtype, value.wide or value.dtype} != {attention.dtype} or attention.dtype not in DTYPES:
            return f"computes and stores in float32 or bfloat16, not {key.dtype}/{value.dtype} for {attention.dtype}"
        if key.dtype != value.dtype:
            return f"stores keys and values in one dtype, not {key.dtype} and {value.dtype}"
        odd = [n for n in (key.shape[1], value.shape[1]) if n % 16 or not 16 <= n <= MAX_HEAD_DIM]
        if odd:
            return f"head_dim {odd[0]} is not a multiple of 16 up to {MAX_HEAD_DIM}"
        if attention.heads % key.shape[0]:
            return f"{attention.heads} query heads are not a multiple of {key.shape[0]} key heads"
        return None

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (16, 32, 64, 128)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return spec.nbytes * block_size

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> PagedViews:
        begin_small(storage)
        return PagedViews(storage, spec, block_size)

    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> PagedViews:
        begin_small(storage)
        return PagedViews(storage, spec, block_size, scales)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> PagedMeta:
        meta = PagedMeta(step, attention)
        key, value = spec.tensors
        geometry = Geometry(
            attention.heads,
            key.shape[0],
            key.shape[1],
            value.shape[1],
            block_size,
            0,
            spec.window or 0,
            spec.kind == "chunk",
        )
        self._native().plan(ctypes.addressof(geometry), meta.address, meta.room)
        return meta

    def write(self, views: PagedViews, meta: PagedMeta, *values: torch.Tensor) -> None:
        key, value = (t if t.stride(-1) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in values)
        geometry, tokens = views.geometry(meta.attention), meta.struct.tokens
        dtype = getattr(torch, meta.attention.dtype)
        for what, rows, spec in zip(("the key", "the value"), (key, value), views.spec.tensors, strict=True):
            if rows.dtype is not dtype or rows.shape != (tokens, *spec.shape):
                raise ValueError(f"{what} is {rows.dtype} {list(rows.shape)}, not {dtype} {[tokens, *spec.shape]}")
        self._native().function("write", meta.attention.dtype)(
            ctypes.addressof(geometry),
            meta.address,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            self._device.threads,
        )

    def attend(
        self, views: PagedViews, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        query, dtype, heads = query.contiguous(), getattr(torch, meta.attention.dtype), meta.attention.heads
        out = query.new_empty(query.shape[0], query.shape[1], views.spec.tensors[1].shape[1])
        if sinks is not None:
            sinks = sinks.to(query.dtype).contiguous()
        self._native().function("attend", meta.attention.dtype)(
            ctypes.addressof(views.geometry(meta.attention)),
            meta.address,
            require("the query", query, dtype, (meta.struct.tokens, heads, views.spec.tensors[0].shape[1])),
            optional("sinks", sinks, dtype, (heads,)),
            out.data_ptr(),
            self._device.threads,
        )
        return out

    def copy_blocks(self, views: PagedViews, source: torch.Tensor, target: torch.Tensor) -> None:
        views.storage[target] = views.storage[source]

    def export_blocks(self, views: PagedViews, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key, value = views.spec.tensors
        keys = views.keys[blocks].permute(0, 2, 4, 1, 3, 5).reshape(len(blocks), views.block_size, *key.shape)
        values = views.values[blocks].permute(0, 2, 3, 5, 1, 4).reshape(len(blocks), views.block_size, *value.shape)
        return self._wide(views, (keys, values))

    def import_blocks(self, views: PagedViews, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        keys, rest = self._elements(views, values)
        n, (_, heads, groups, pairs, _, lanes) = len(blocks), views.keys.shape
        cut = keys.to(views.keys.dtype).reshape(n, groups, 16, heads, pairs, lanes)
        views.keys[blocks] = cut.permute(0, 3, 1, 4, 2, 5)
        dv = views.values.shape[4]
        cut = rest.to(views.values.dtype).reshape(n, groups, 16 // lanes, lanes, heads, dv)
        views.values[blocks] = cut.permute(0, 4, 1, 2, 5, 3)

    def _wide(self, views: PagedViews, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Exported blocks as numbers."""
        if not views.scales:
            return parts
        wide = (getattr(torch, tensor.wide or tensor.dtype) for tensor in views.spec.tensors)
        return tuple(dequantize(*each).to(kind) for *each, kind in zip(parts, views.scales, wide, strict=True))

    def _elements(self, views: PagedViews, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Numbers to import as they are stored."""
        if not views.scales:
            return values
        return [quantize(v, scale, views.keys.dtype) for v, scale in zip(values, views.scales, strict=True)]

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        # Partial results of spans: in the worst case every token belongs to another request.
        value_dim = spec.tensors[1].shape[1]
        spans = max_kv // _SPAN + max_tokens
        plan = (max_tokens * 3 + spans) * _ITEM_WORDS * 4
        rows = 48 + attention.heads
        room = 64 * sum(t.shape[1] for t in spec.tensors if t.wide)
        per_thread = (2 * rows * (value_dim + 2) + 1024 + room) * 4 + 2 * 256 * 16 * 4
        return plan + spans * attention.heads * (value_dim + 2) * 4 + per_thread * self._device.threads

    def _native(self) -> Any:
        return self._device.native
