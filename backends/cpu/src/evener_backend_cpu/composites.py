"""Kernels for composites: a whole decoder layer, or a part of it, is one call of the C++ library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, cast

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import DecoderLayerStatic, MLPStatic, QKVStatic
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener_backend_cpu.block_packing import LAYOUT as BLOCKS
from evener_backend_cpu.block_packing import addresses
from evener_backend_cpu.native_library import Layer, Matrix
from evener_backend_cpu.primitives import ACTIVATIONS, NativeKernel
from evener_backend_cpu.state import LAYOUT, MAX_HEAD_DIM, PagedMeta, PagedViews

_ENTER, _ATTEND, _MLP = 1, 2, 4
_NO_MEMORY = "no memory for a layer's scratch; lower infer.step_tokens or infer.kv_memory"


class _Site:
    """One call site: the C struct with its sizes and the addresses of the weights of the last call."""

    def __init__(self, attention: QKVStatic | None, mlp: MLPStatic | None, layouts: Mapping[str, str]) -> None:
        self._attention_static, self.struct = attention, Layer()
        self.address = ctypes.addressof(self.struct)
        self._key: tuple[Any, ...] = (None, None, None)
        self._kept: list[torch.Tensor | PackedWeight] = []
        s = self.struct
        s.packed = BLOCKS in layouts.values()
        if attention is not None:
            s.hidden, s.rotary, s.interleaved = attention["hidden"], attention["rotary_dim"], attention["interleaved"]
            s.eps, s.offset = attention["eps"], attention["offset"]
            s.g.heads, s.g.kv_heads = attention["heads"], attention["kv_heads"]
            s.g.d, s.g.dv = attention["head_dim"], attention["value_dim"]
        if mlp is not None:
            s.hidden, s.inner, s.activation = mlp["hidden"], mlp["inner"], ACTIVATIONS[mlp["activation"]]
            s.mlp_eps, s.mlp_offset = mlp["eps"], mlp["offset"]

    def bind(self, attention: AttentionWeights | None, mlp: MLPWeights | None, views: PagedViews | None) -> int:
        """Put these weights and pages into the struct; returns its address. They are the same objects at every step."""
        key = self._key
        if key[0] is attention and key[1] is mlp and key[2] is views:
            return self.address
        self._kept.clear()
        s = self.struct
        if attention is not None and views is not None and self._attention_static is not None:
            s.g = views.geometry(self._attention_static["state"].attention)
            for name in AttentionWeights._fields:
                if name not in ("qkv", "o"):
                    setattr(s, name, self._address(getattr(attention, name)))
            s.qkv, s.o = self._matrix(attention.qkv), self._matrix(attention.o)
        if mlp is not None:
            s.gate_up_bias, s.down_bias = self._address(mlp.gate_up_bias), self._address(mlp.down_bias)
            s.gate_up, s.down = self._matrix(mlp.gate_up), self._matrix(mlp.down)
            s.mlp_norm, s.mlp_post_norm = self._address(mlp.norm), self._address(mlp.post_norm)
        self._key = (attention, mlp, views)
        return self.address

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous(), "the loader makes contiguous weights"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, weight: PackedWeight) -> Matrix:
        self._kept.append(weight)
        return Matrix(*addresses(weight))


class _Composite(NativeKernel):
    """Base of the kernels below."""

    takes_weights = True
    non_default = frozenset({"query_scale"})
    flags = 0

    def _parts(self, static: Mapping[str, Any]) -> tuple[QKVStatic | None, MLPStatic | None]:
        """Static parameters of the attention and of the MLP."""
        attention = cast(QKVStatic, static) if self.flags & (_ENTER | _ATTEND) else None
        return attention, cast(MLPStatic, static) if self.flags & _MLP else None

    def _unsupported_reason(self, call: OpCall) -> str | None:
        attention, mlp = self._parts(call.static)
        if mlp is not None and mlp["activation"] not in ACTIVATIONS:
            return f"does not know activation {mlp['activation']!r}"
        if attention is None:
            return None
        for name, size in (("head_dim", attention["head_dim"]), ("value_dim", attention["value_dim"])):
            if size % 16 or size > MAX_HEAD_DIM:
                return f"{name} {size} is not a multiple of 16 up to {MAX_HEAD_DIM}"
        if attention["rotary_dim"] % 2:
            return f"rotary_dim {attention['rotary_dim']} is odd"
        return None

    def workspace(self, call: OpCall) -> int:
        site = _Site(*self._parts(call.static), call.layouts)
        scratch = self.native.function("scratch", call.static["dtype"])
        return int(scratch(site.address, call.bucket.high, 0, self.device.threads))


class _Layer(_Composite):
    """A kernel that returns the next (x, residual): the attention half of a layer, or both halves."""

    state_layout = LAYOUT

    def _run(self, call: OpCall) -> OpFunction:
        """The callable of both halves; ``mlp`` is None if the flags leave it out."""
        device, function = self.device, self.native.function("layer", call.static["dtype"])
        site, flags = _Site(*self._parts(call.static), call.layouts), self.flags
        bind = site.bind

        def run(
            x: torch.Tensor,
            residual: torch.Tensor | None,
            positions: torch.Tensor,
            attention: AttentionWeights,
            mlp: MLPWeights | None,
            views: PagedViews,
            meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            stream, out, more = _streams(x, residual)
            if function(
                bind(attention, mlp, views),
                meta.address,
                x.shape[0],
                more,
                stream.data_ptr(),
                out.data_ptr(),
                positions.data_ptr(),
                positions.dtype is torch.int64,
                flags,
                device.threads,
            ):
                raise MemoryError(_NO_MEMORY)
            return out, stream

        return run


class NativeDecoderLayer(_Layer):
    """A decoder layer in one parallel region."""

    op = "decoder_layer"
    flags = _ENTER | _ATTEND | _MLP

    def _parts(self, static: Mapping[str, Any]) -> tuple[QKVStatic | None, MLPStatic | None]:
        layer = cast(DecoderLayerStatic, static)
        return layer["attention"], layer["mlp"]

    def build(self, call: OpCall) -> OpFunction:
        return self._run(call)


class NativeAttentionBlock(_Layer):
    """The attention half of a layer in one parallel region."""

    op = "attention_block"
    flags = _ENTER | _ATTEND

    def build(self, call: OpCall) -> OpFunction:
        layer = self._run(call)

        def run(
            x: torch.Tensor,
            residual: torch.Tensor | None,
            positions: torch.Tensor,
            weights: AttentionWeights,
            views: PagedViews,
            meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return layer(x, residual, positions, weights, None, views, meta)  # type: ignore[no-any-return]

        return run


class NativeNormQkvRotaryWrite(_Composite):
    """Everything before attention in one parallel region."""

    op = "norm_qkv_rotary_write"
    flags = _ENTER
    state_layout = LAYOUT

    def build(self, call: OpCall) -> OpFunction:
        static = cast(QKVStatic, call.static)
        device, function = self.device, self.native.function("layer", static["dtype"])
        site, heads, dim = _Site(*self._parts(static), call.layouts), static["heads"], static["head_dim"]
        last: list[Any] = [None]

        def run(
            x: torch.Tensor,
            residual: torch.Tensor | None,
            positions: torch.Tensor,
            norm: torch.Tensor,
            qkv: PackedWeight,
            qkv_bias: torch.Tensor | None,
            q_norm: torch.Tensor | None,
            k_norm: torch.Tensor | None,
            cos_sin: torch.Tensor,
            views: PagedViews,
            meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # This part does not read the output projection's field.
            weights = AttentionWeights(norm, qkv, qkv, cos_sin, qkv_bias, None, q_norm, k_norm)
            if last[0] is None or any(a is not b for a, b in zip(last[0], weights, strict=True)):
                last[0] = weights
            stream = x.float() if residual is None else residual
            query = x.new_empty(x.shape[0], heads, dim)
            if function(
                site.bind(last[0], None, views),
                meta.address,
                x.shape[0],
                None if residual is None else x.data_ptr(),
                stream.data_ptr(),
                query.data_ptr(),
                positions.data_ptr(),
                positions.dtype is torch.int64,
                _ENTER,
                device.threads,
            ):
                raise MemoryError(_NO_MEMORY)
            return query, stream

        return run


class NativeMlpBlock(_Composite):
    """The MLP half of a layer in one parallel region."""

    op = "mlp_block"
    flags = _MLP

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("layer", call.static["dtype"])
        site = _Site(*self._parts(call.static), call.layouts)

        def run(x: torch.Tensor, residual: torch.Tensor, weights: MLPWeights) -> tuple[torch.Tensor, torch.Tensor]:
            if function(
                site.bind(None, weights, None),
                None,
                x.shape[0],
                x.data_ptr(),
                residual.data_ptr(),
                x.data_ptr(),
                None,
                0,
                _MLP,
                device.threads,
            ):
                raise MemoryError(_NO_MEMORY)
            return x, residual

        return run


def _streams(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """(float32 stream, output tensor, address of what is first added to the stream). Inputs are donated."""
    if residual is None:
        stream = x.float()
        return stream, torch.empty_like(x) if stream is x else x, None
    return residual, x, x.data_ptr()


COMPOSITES = (NativeDecoderLayer, NativeAttentionBlock, NativeNormQkvRotaryWrite, NativeMlpBlock)
