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
from evener_backend_cpu.arguments import require, require_count, require_indices, require_weight
from evener_backend_cpu.block_packing import LAYOUT as BLOCKS
from evener_backend_cpu.native_library import Layer, Matrix
from evener_backend_cpu.primitives import ACTIVATIONS, NativeKernel
from evener_backend_cpu.segments import addresses
from evener_backend_cpu.state import LAYOUT, MAX_HEAD_DIM, PagedMeta, PagedViews

_ENTER, _ATTEND, _MLP = 1, 2, 4


class _Site:
    """One call site: the C struct with its sizes and the addresses of the weights of the last call."""

    def __init__(self, attention: QKVStatic | None, mlp: MLPStatic | None, layouts: Mapping[str, str]) -> None:
        self._attention_static, self.struct = attention, Layer()
        self.address = ctypes.addressof(self.struct)
        self._key: tuple[Any, ...] = (None, None, None)
        self._kept: list[torch.Tensor | PackedWeight] = []
        s = self.struct
        self._mlp_static = mlp
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
        if attention is not None and views is not None and self._attention_static is not None:
            self._bind_attention(self._attention_static, attention, views)
        if mlp is not None and self._mlp_static is not None:
            self._bind_mlp(self._mlp_static, mlp)
        self._key = (attention, mlp, views)
        return self.address

    def _bind_attention(self, a: QKVStatic, weights: AttentionWeights, views: PagedViews) -> None:
        s, dtype, hidden = self.struct, getattr(torch, a["dtype"]), a["hidden"]
        s.g = views.geometry(a["state"].attention)
        held, declared = (
            (s.g.heads, s.g.kv_heads, s.g.d, s.g.dv),
            (a["heads"], a["kv_heads"], a["head_dim"], a["value_dim"]),
        )
        if held != declared:
            raise ValueError(f"the state is for heads, KV heads and widths {held}; the layer has {declared}")
        heads, d, dv = a["heads"], a["head_dim"], a["value_dim"]
        rows, s.positions = (heads + a["kv_heads"]) * d + a["kv_heads"] * dv, weights.cos_sin.shape[0]
        s.qkv = self._matrix("qkv", weights.qkv, (rows, hidden), dtype)
        # The part before attention gets no output projection; what stands in its place is not read.
        s.o = self._matrix("o", weights.o, (hidden, heads * dv) if "o" in a else (rows, hidden), dtype)
        counts = {"norm": hidden, "qkv_bias": rows, "q_norm": d, "k_norm": d, "o_bias": hidden, "sinks": heads,
                  "post_norm": hidden}  # fmt: skip
        for name, count in counts.items():
            setattr(s, name, self._address(name, getattr(weights, name), dtype, count))
        s.cos_sin = self._address("cos_sin", weights.cos_sin, torch.float32, s.positions * s.rotary)
        s.query_scale = self._address("query_scale", weights.query_scale, torch.float32, s.positions)

    def _bind_mlp(self, m: MLPStatic, weights: MLPWeights) -> None:
        s, dtype, hidden, inner = self.struct, getattr(torch, m["dtype"]), m["hidden"], m["inner"]
        s.gate_up = self._matrix("gate_up", weights.gate_up, (2 * inner, hidden), dtype)
        s.down = self._matrix("down", weights.down, (hidden, inner), dtype)
        s.gate_up_bias = self._address("gate_up_bias", weights.gate_up_bias, dtype, 2 * inner)
        s.down_bias = self._address("down_bias", weights.down_bias, dtype, hidden)
        s.mlp_norm = self._address("the MLP's norm", weights.norm, dtype, hidden)
        s.mlp_post_norm = self._address("the MLP's post_norm", weights.post_norm, dtype, hidden)

    def _address(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, count: int) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return require_count(name, tensor, dtype, count)

    def _matrix(self, name: str, weight: PackedWeight, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        require_weight(name, weight, shape, dtype)
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
        if attention["rotary_dim"] % 2 or attention["rotary_dim"] > attention["head_dim"]:
            return f"rotary_dim {attention['rotary_dim']} is odd, or more than head_dim {attention['head_dim']}"
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
        bind, dtype = site.bind, getattr(torch, call.static["dtype"])
        hidden = site.struct.hidden

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
            tokens = x.shape[0]
            require("the input", x, dtype, (tokens, hidden))
            function(
                bind(attention, mlp, views),
                meta.address,
                tokens,
                more,
                require("the residual", stream, torch.float32, (tokens, hidden)),
                out.data_ptr(),
                *require_indices("positions", positions, tokens),
                flags,
                device.threads,
            )
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
        site, heads, dim = _Site(*self._parts(call.static), call.layouts), static["heads"], static["head_dim"]
        dtype, hidden = getattr(torch, static["dtype"]), static["hidden"]
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
            shape = x.shape[0], hidden
            require("the input", x, dtype, shape)
            function(
                site.bind(last[0], None, views),
                meta.address,
                x.shape[0],
                None if residual is None else x.data_ptr(),
                require("the residual", stream, torch.float32, shape),
                query.data_ptr(),
                *require_indices("positions", positions, x.shape[0]),
                _ENTER,
                device.threads,
            )
            return query, stream

        return run


class NativeMlpBlock(_Composite):
    """The MLP half of a layer in one parallel region."""

    op = "mlp_block"
    flags = _MLP

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("layer", call.static["dtype"])
        site = _Site(*self._parts(call.static), call.layouts)
        dtype, hidden = getattr(torch, call.static["dtype"]), call.static["hidden"]

        def run(x: torch.Tensor, residual: torch.Tensor, weights: MLPWeights) -> tuple[torch.Tensor, torch.Tensor]:
            address = require("the input", x, dtype, (x.shape[0], hidden))
            function(
                site.bind(None, weights, None),
                None,
                x.shape[0],
                address,
                require("the residual", residual, torch.float32, x.shape),
                address,
                None,
                0,
                _MLP,
                device.threads,
            )
            return x, residual

        return run


def _streams(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """(float32 stream, output tensor, address of what is first added to the stream). Inputs are donated."""
    if residual is None:
        stream = x.float()
        return stream, torch.empty_like(x) if stream is x else x, None
    return residual, x, x.data_ptr()


COMPOSITES = (NativeDecoderLayer, NativeAttentionBlock, NativeNormQkvRotaryWrite, NativeMlpBlock)
