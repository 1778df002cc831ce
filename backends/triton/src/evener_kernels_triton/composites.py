"""Kernels for composites: the parts of a decoder layer in a few launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import AttentionStatic, HeadStatic, MLPStatic, NormStatic, QKVStatic
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.jit.heads import norm_rotary_write_kernel
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.kernel import ACTIVATIONS, rotation_refusal
from evener_kernels_triton.linear import (
    Matrix,
    ProductKernel,
    enters_gemv,
    gemv,
    is_packed,
    is_stored,
    persistent_gemv,
    product_bytes,
    product_variants,
    project_rows,
    skinny,
)
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.packed_token import enters_token, packed_token
from evener_kernels_triton.primitives import act_rows, norm_rows, rows_of
from evener_kernels_triton.rounded import (
    act_round,
    activated_product,
    activation_sizes,
    norm_round,
    rounded_product,
    rounds,
)
from evener_kernels_triton.state import LAYOUT, PagedMeta, PagedState, PagedViews
from evener_kernels_triton.stored import STORED, StoredMatrix, in_words
from evener_kernels_triton.tuning import Tuning, power_of_two
from evener_kernels_triton.variants import combined

Enter = Callable[..., tuple[torch.Tensor, torch.Tensor]]
#: Up to so many tokens the activation is in the product with stored elements: 3.4 µs less of a layer of Qwen3-8B on an
#: H100 with 16 tokens. With 64 and scales of 128 x 128 the layer took 35 more.
MAX_ACTIVATED_TOKENS = 16


def enter_rows(tuning: Tuning, call: OpCall, weight: LinearWeight, activation: str = "") -> Enter:
    """(Add,) norm and projection with ``weight``, with an optional activation; returns its rows and the float32
    stream. If ``norms_apart``, it also takes the weight of a norm of x before the sum, last."""
    s = cast(NormStatic, call.static)
    eps, offset, dtype = s["eps"], s["offset"], getattr(torch, s["dtype"])
    project = project_rows(tuning, call, dtype, weight)
    few = call.bucket.high <= MAX_ACTIVATED_TOKENS
    inside = bool(activation) and few and tuning.uses_own_product(call.bucket.high, weight.rows, is_stored(weight))

    def one(
        x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, w: torch.Tensor | StoredMatrix,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x = rows_of(x)
        if residual is None:
            y = persistent_gemv(
                tuning, x, w, dtype, bias=bias, gain=norm, eps=eps, offset=offset, activation=activation
            )
            return y, x.float()
        # All programs read the residual while one writes the sum, so the sum needs its own memory.
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        y = persistent_gemv(
            tuning, x, w, dtype, bias=bias, residual=rows_of(residual), total=total, gain=norm, eps=eps, offset=offset,
            activation=activation,
        )  # fmt: skip
        return y, total

    def packed(
        x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, w: PackedMatrix, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, more, total = rows_of(x), None, None
        if residual is not None:
            more, total = rows_of(residual), torch.empty(x.shape, dtype=torch.float32, device=x.device)
        y = packed_token(
            tuning, dtype, x, w, bias=bias, residual=more, total=total, gain=norm, eps=eps, offset=offset,
            activation=activation,
        )  # fmt: skip
        return y, x.float() if total is None else total

    def some(
        x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, w: Matrix, bias: torch.Tensor | None,
        post: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        y, total = norm_rows(tuning, x, residual, norm, eps, offset, dtype, post)
        after = x.float() if total is None else total
        # Measured: of plain numbers, for more tokens, gate and up rows in one tile are slower.
        if activation and call.bucket.high == 1 and not isinstance(w, PackedMatrix) and in_words(w):
            return gemv(tuning, y, w, dtype, bias=bias, activation=activation), after
        if inside and isinstance(w, StoredMatrix):
            return skinny(tuning, y, w, dtype, bias=bias, activation=activation), after
        wide = project(y, w, bias)
        return (act_rows(tuning, wide, w.shape[0] // 2, activation) if activation else wide), after

    def rounding(
        x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, w: StoredMatrix, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, total, _ = norm_round(tuning, x, residual, norm, eps, offset, dtype, w)
        wide = rounded_product(tuning, dtype, rows, w, bias)
        made = act_rows(tuning, wide, w.shape[0] // 2, activation) if activation else wide
        return made, x.float() if total is None else total

    if rounds(tuning, call.bucket.high, weight):
        return rounding
    if norms_apart(tuning, call, weight, activation):
        return some
    return packed if is_packed(weight) else one


def norms_apart(tuning: Tuning, call: OpCall, weight: LinearWeight, activation: str = "") -> bool:
    """Whether the norm of ``enter_rows`` has a launch of its own, which stores its rows as they are."""
    tokens, dtype, halves = call.bucket.high, getattr(torch, call.static["dtype"]), 2 if activation else 1
    if tokens > 1:
        return not rounds(tuning, tokens, weight)
    if is_packed(weight):
        return not enters_token(tuning, weight.parts, dtype.itemsize, halves)
    return not enters_gemv(tuning, weight, halves, dtype)


class _Composite(ProductKernel):
    """Base of the kernels below."""

    packings = (PLAIN, STORED, PACKED)
    priority = 100

    def _entry(self, call: OpCall, weight: LinearWeight, activation: str = "") -> Sequence[Variant]:
        """Variants of ``enter_rows``."""
        return product_variants(self.tuning, call, weight, 2 if activation else 1)

    def _exit(self, call: OpCall, weight: LinearWeight) -> Sequence[Variant]:
        """Variants of ``project_rows`` with ``weight``."""
        return product_variants(self.tuning, call, weight)

    def _held(self, call: OpCall, width: int, **weights: LinearWeight) -> int:
        """Bytes of ``width`` numbers for each token, and of the largest partial sums of its products."""
        tuning, size = self.tuning.with_changes(call.variant), getattr(torch, call.static["dtype"]).itemsize
        own = (product_bytes(tuning.part(part), call, weight) for part, weight in weights.items())
        return int(call.bucket.high * width * size) + max(own)


class TritonNormQkvRotaryWrite(_Composite):
    """Norm (fused into the product for one token), projection, then head norms, rotation and write in one launch."""

    op = "norm_qkv_rotary_write"
    state_layout = LAYOUT

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(QKVStatic, call.static)
        return rotation_refusal(s["rotary_dim"], s["head_dim"])

    def workspace(self, call: OpCall) -> int:
        s = cast(QKVStatic, call.static)
        wide, query = s["qkv"].rows, s["heads"] * s["head_dim"]
        return self._held(call, wide + max(0, s["hidden"] - query), enter=s["qkv"])

    def variants(self, call: OpCall) -> Sequence[Variant]:
        return combined({"enter": self._entry(call, cast(QKVStatic, call.static)["qkv"])})

    def build(self, call: OpCall) -> OpFunction:
        return _write_heads(self.tuning.with_changes(call.variant), call)


def _write_heads(tuning: Tuning, call: OpCall) -> OpFunction:
    s = cast(QKVStatic, call.static)
    heads, kv_heads, d, dv = s["heads"], s["kv_heads"], s["head_dim"], s["value_dim"]
    # For many tokens, fewer and larger programs: 61 µs instead of 120 for 8,192 tokens of 32 + 8 + 8 heads of 128.
    each, warps = (8, 2) if call.bucket.high > 64 else (4, 1)
    enter = enter_rows(tuning.part("enter"), call, s["qkv"])
    tiles = -(-heads // each) + 2 * -(-kv_heads // each)
    sizes = {
        "eps": s["eps"], "offset": s["offset"], "HEADS": heads, "KV_HEADS": kv_heads, "ROTARY": s["rotary_dim"],
        "INTERLEAVED": bool(s["interleaved"]), "NORM": bool(s["qk_norm"]), "D": d, "DV": dv,
        "DP": power_of_two(max(d, dv)), "H": each, "OVERLAP": tuning.overlap, "num_warps": warps, **tuning.launch,
    }  # fmt: skip
    launches: dict[tuple[int, str], PreparedLaunch] = {}

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, norm: torch.Tensor, qkv: PackedWeight,
        qkv_bias: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, cos_sin: torch.Tensor,
        views: PagedViews, meta: PagedMeta,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        wide, stream = enter(x, residual, norm, qkv.data, qkv_bias)
        tokens, row = wide.shape
        query = torch.empty(tokens, heads, d, dtype=wide.dtype, device=wide.device)
        launch = launches.get((views.block_size, views.kind))
        if launch is None:
            launch = launches[views.block_size, views.kind] = PreparedLaunch(
                norm_rotary_write_kernel, PAGE=views.block_size, KIND=views.kind, **sizes
            )
        launch(
            (tokens, tiles, 1), positions, meta.step.slot_mapping, wide, q_norm if q_norm is not None else wide,
            k_norm if k_norm is not None else wide, cos_sin, query, views.keys, views.values,
            views.key_scales, views.value_scales, row, views.key_page, views.value_page,
        )  # fmt: skip
        return query, stream

    return run


class TritonAttentionBlock(_Composite):
    """The kernel above, attention, output projection."""

    op = "attention_block"
    state_layout = LAYOUT
    non_default = frozenset({"query_scale"})

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(AttentionStatic, call.static)
        return rotation_refusal(s["rotary_dim"], s["head_dim"])

    def workspace(self, call: OpCall) -> int:
        s = cast(AttentionStatic, call.static)
        slot = s["state"]
        wide, query, hidden = s["qkv"].rows, s["heads"] * s["head_dim"], s["hidden"]
        # Memory besides the stream, by launch; the block's result is the last of it.
        most = max(wide, wide + query - hidden, query + s["heads"] * s["value_dim"], query + hidden * s["post_norm"])
        if s.get("query_scale"):  # queries, their products with float32 factors, and these rounded
            most = max(most, 4 * query)
        assert slot.provider is not None, "state is resolved before composites"
        state = slot.provider.workspace(slot.spec, slot.attention, call.bucket.high, 0)
        return self._held(call, most, enter=s["qkv"], project=s["o"]) + int(state)

    def variants(self, call: OpCall) -> Sequence[Variant]:
        s = cast(AttentionStatic, call.static)
        return combined({"enter": self._entry(call, s["qkv"]), "project": self._exit(call, s["o"])})

    def build(self, call: OpCall) -> OpFunction:
        tuning, s = self.tuning.with_changes(call.variant), cast(AttentionStatic, call.static)
        dtype = getattr(torch, s["dtype"])
        write = _write_heads(tuning, call)
        project = project_rows(tuning.part("project"), call, dtype, s["o"])
        provider: Any = s["state"].provider
        rounding = rounds(tuning, call.bucket.high, s["o"]) and isinstance(provider, PagedState)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: AttentionWeights,
            views: PagedViews, meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            query, stream = write(
                x, residual, positions, w.norm, w.qkv, w.qkv_bias, w.q_norm, w.k_norm, w.cos_sin, views, meta
            )
            if w.query_scale is not None:
                query = (query * w.query_scale[positions][:, None, None]).to(query.dtype)
            if rounding:
                rows = provider.attend_rounded(views, meta, query, w.sinks, w.o.data)
                x = rounded_product(tuning.part("project"), dtype, rows, w.o.data, w.o_bias)
            else:
                x = project(provider.attend(views, meta, query, w.sinks).flatten(1), w.o.data, w.o_bias)
            if s["post_norm"]:
                assert w.post_norm is not None, "declared with the flag"
                x, _ = norm_rows(tuning, x, None, w.post_norm, s["eps"], s["offset"], dtype)
            return x, stream

        return run


class TritonMlpBlock(_Composite):
    """Norm, gate and up with the activation, down."""

    op = "mlp_block"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        kind = cast(MLPStatic, call.static)["activation"]
        return None if kind in ACTIVATIONS else f"does not know activation {kind!r}"

    def workspace(self, call: OpCall) -> int:
        s = cast(MLPStatic, call.static)
        inner = s["gate_up"].rows // 2
        width = max(3 * inner, inner + s["hidden"] * s["post_norm"])
        return self._held(call, width, enter=s["gate_up"], project=s["down"])

    def variants(self, call: OpCall) -> Sequence[Variant]:
        s = cast(MLPStatic, call.static)
        entry = self._entry(call, s["gate_up"], s["activation"])
        return combined({"enter": entry, "project": self._exit(call, s["down"])})

    def build(self, call: OpCall) -> OpFunction:
        return mlp_rows(self.tuning.with_changes(call.variant), call)


def mlp_rows(tuning: Tuning, call: OpCall) -> OpFunction:
    """The function of an ``mlp_block``. What is given beside the block's own inputs goes to ``enter_rows``."""
    s = cast(MLPStatic, call.static)
    dtype = getattr(torch, s["dtype"])
    act, rounding = s["activation"], rounds(tuning, call.bucket.high, s["down"])
    enter = enter_rows(tuning.part("enter"), call, s["gate_up"], "" if rounding else act)
    project = project_rows(tuning.part("project"), call, dtype, s["down"])

    def leave(wide: torch.Tensor, w: MLPWeights) -> torch.Tensor:
        if not rounding:
            return project(wide, w.down.data, w.down_bias)
        rows = act_round(tuning, wide, wide.shape[1] // 2, act, w.down.data)
        return rounded_product(tuning.part("project"), dtype, rows, w.down.data, w.down_bias)

    inside = activation_sizes(tuning, call.bucket.high, s["gate_up"], s["down"])

    def run(
        x: torch.Tensor, residual: torch.Tensor, w: MLPWeights, *more: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if inside is not None and w.gate_up_bias is None and w.norm is not None:
            gate_up = w.gate_up.data
            rows, total, _ = norm_round(tuning, x, residual, w.norm, s["eps"], s["offset"], dtype, gate_up)
            assert total is not None, "there is a residual"
            made, stream = activated_product(tuning, inside, rows, gate_up, act), total
            x = rounded_product(tuning.part("project"), dtype, made, w.down.data, w.down_bias)
        else:
            wide, stream = enter(x, residual, w.norm, w.gate_up.data, w.gate_up_bias, *more)
            x = leave(wide, w)
        if s["post_norm"]:
            assert w.post_norm is not None, "declared with the flag"
            x, _ = norm_rows(tuning, x, None, w.post_norm, s["eps"], s["offset"], dtype)
        return x, stream

    return run


class TritonHead(_Composite):
    """Norm from the float32 stream to the compute dtype, then the logits with sums in float32."""

    op = "head"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(HeadStatic, call.static)
        if s["cap"]:
            return "has no soft cap"
        few = self.tuning.uses_own_product(call.bucket.high, s["weight"].rows, is_stored(s["weight"]))
        if call.device.host_memory and not few and s["dtype"] != "float32":
            return "torch has no such product on the host"
        return None

    def workspace(self, call: OpCall) -> int:
        s = cast(HeadStatic, call.static)
        return self._held(call, s["hidden"], project=s["weight"])

    def variants(self, call: OpCall) -> Sequence[Variant]:
        return combined({"project": self._exit(call, cast(HeadStatic, call.static)["weight"])})

    def build(self, call: OpCall) -> OpFunction:
        tuning, s = self.tuning.with_changes(call.variant), cast(HeadStatic, call.static)
        dtype = getattr(torch, s["dtype"])
        project = project_rows(tuning.part("project"), call, torch.float32, s["weight"])

        def run(x: torch.Tensor, norm: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
            y, _ = norm_rows(tuning, x, None, norm, s["eps"], s["offset"], dtype)
            return project(y, weight.data, bias)

        return run


COMPOSITES: tuple[Any, ...] = (TritonNormQkvRotaryWrite, TritonAttentionBlock, TritonMlpBlock, TritonHead)
