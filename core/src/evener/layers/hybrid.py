"""Mixers of hybrid models: a gated delta net, and attention whose result is gated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.layers.builder import Builder
from evener.layers.declared import CallSite, StateSlot, WeightGroup
from evener.layers.norms import norm_weight
from evener.layers.rotary import RotaryConfig
from evener.ops.hybrid import DeltaWeights, GatedAttentionWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta net (Yang et al. 2024) of one layer, as Qwen3-Next stores it.

    Attributes:
        heads, key_heads: of values, and of queries and keys; the former are a multiple of the latter.
        key_dim, value_dim: of one head.
        width: of the causal convolution.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int

    def declare(self, build: Builder, prefix: str, common: Mapping[str, Any]) -> DeltaNet:
        """The mixer of layer ``prefix``; ``common``: hidden, dtype, eps and offset of its norms."""
        return DeltaNet(build, prefix, common, self)


class DeltaNet:
    """One call of ``delta_block``."""

    def __init__(self, build: Builder, prefix: str, common: Mapping[str, Any], c: DeltaConfig) -> None:
        at, hidden = f"{prefix}.linear_attn", common["hidden"]
        keys, values = c.key_heads * c.key_dim, c.heads * c.value_dim
        channels = 2 * keys + values
        enter = {f"{at}.in_proj_qkvz.weight": channels + values, f"{at}.in_proj_ba.weight": 2 * c.heads}
        linears = {
            "enter": build.linear(f"{at}.in_proj", enter, hidden),
            "o": build.linear(f"{at}.out_proj", {f"{at}.out_proj.weight": hidden}, values),
        }
        conv = StateTensor("conv", (channels, c.width - 1), build.dtype)
        delta = StateTensor("delta", (c.heads, c.key_dim, c.value_dim), "float32")
        spec = StateSpec("recurrent", (conv, delta), per="request", every=build.snapshot_every)
        attention = AttentionSpec(c.heads, c.key_dim, c.key_dim**-0.5, dtype=build.dtype, algorithm="gated_delta")
        self.slot: StateSlot = build.state(at, spec, attention)
        self.weights: WeightGroup = build.group(
            DeltaWeights, **linears, norm=norm_weight(build, prefix, "input_layernorm", hidden, common),
            filters=build.weight(f"{at}.conv1d.weight", channels, 1, c.width),
            a_log=build.weight(f"{at}.A_log", c.heads, dummy="zeros", dtype="float32"),
            dt_bias=build.weight(f"{at}.dt_bias", c.heads, dummy="ones", dtype="float32"),
            inner_norm=build.weight(f"{at}.norm.weight", c.value_dim, dummy="ones"),
        )  # fmt: skip
        static = {"heads": c.heads, "key_heads": c.key_heads, "key_dim": c.key_dim, "value_dim": c.value_dim}
        self.site: CallSite = build.op("delta_block", at, **common, **static, **linears, state=self.slot)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``; returns the next pair, each [T, hidden]."""
        slot = self.slot
        return self.site.table[step.bucket](  # type: ignore[no-any-return]
            x, residual, self.weights.values, slot.views, step.metas[slot.group]
        )


@dataclass(frozen=True, kw_only=True)
class GatedAttentionConfig:
    """Attention with normalised heads whose result is gated, of one layer; the query projection makes the gates."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    bias: bool = False

    def declare(self, build: Builder, prefix: str, common: Mapping[str, Any]) -> GatedAttention:
        """The mixer of layer ``prefix``; ``common``: hidden, dtype, eps and offset of its norms."""
        return GatedAttention(build, prefix, common, self)


class GatedAttention:
    """One call of ``gated_attention_block``."""

    def __init__(self, build: Builder, prefix: str, common: Mapping[str, Any], c: GatedAttentionConfig) -> None:
        at, hidden, dim = f"{prefix}.self_attn", common["hidden"], c.head_dim
        rows = {"q": 2 * c.heads * dim, "k": c.kv_heads * dim, "v": c.kv_heads * dim}
        qkv = {f"{at}.{name}_proj.weight": count for name, count in rows.items()}
        o = {f"{at}.o_proj.weight": hidden}
        q_rows, o_rows = build.linear(f"{at}.qkv_proj", qkv, hidden), build.linear(f"{at}.o_proj", o, c.heads * dim)
        linears = {"qkv": q_rows, "o": o_rows}
        tensors = tuple(StateTensor(name, (c.kv_heads, dim), build.dtype) for name in ("key", "value"))
        attention = AttentionSpec(c.heads, dim, dim**-0.5, dtype=build.dtype)
        self.slot: StateSlot = build.state(at, StateSpec("full", tensors), attention)
        self.weights: WeightGroup = build.group(
            GatedAttentionWeights, **linears, norm=norm_weight(build, prefix, "input_layernorm", hidden, common),
            cos_sin=c.rotary.table(build), q_norm=norm_weight(build, at, "q_norm", dim, common),
            k_norm=norm_weight(build, at, "k_norm", dim, common),
            qkv_bias=build.biases(qkv, f"{at}.qkv_bias") if c.bias else None,
            o_bias=build.biases(o, f"{at}.o_bias") if c.bias else None,
        )  # fmt: skip
        static = {"heads": c.heads, "kv_heads": c.kv_heads, "head_dim": dim, "rotary_dim": c.rotary.dim}
        self.site: CallSite = build.op("gated_attention_block", at, **common, **static, **linears, state=self.slot)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``; returns the next pair, each [T, hidden]."""
        slot = self.slot
        return self.site.table[step.bucket](  # type: ignore[no-any-return]
            x, residual, step.positions, self.weights.values, slot.views, step.metas[slot.group]
        )
