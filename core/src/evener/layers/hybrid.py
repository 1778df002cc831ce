"""Mixers of hybrid models: a gated delta net, and attention whose result is gated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.layers.builder import Builder
from evener.layers.declared import CallSite, StateSlot, WeightGroup, joined
from evener.layers.norms import norm_weight
from evener.layers.rotary import RotaryConfig
from evener.ops.hybrid import DeltaWeights, GatedAttentionWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta net (Yang et al. 2024) of one layer.

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
        key_heads, _ = build.share_heads(c.key_heads, c.key_heads)
        heads = key_heads * (c.heads // c.key_heads)
        keys, values = key_heads * c.key_dim, heads * c.value_dim
        whole, channels = 2 * keys.whole + values.whole, 2 * keys.size + values.size
        # Queries, keys, values and gates of one key head lie together; their filters do not.
        enter = {
            f"{at}.in_proj_qkvz.weight": key_heads * ((whole + values.whole) // c.key_heads),
            f"{at}.in_proj_ba.weight": heads * 2,
        }
        first = keys.behind(0, whole), keys.behind(keys.whole, whole), values.behind(2 * keys.whole, whole)
        filters, conv1d = joined(first), f"{at}.conv1d.weight"
        linears = {
            "enter": build.linear(f"{at}.in_proj", enter, hidden),
            "o": build.linear(f"{at}.out_proj", {f"{at}.out_proj.weight": hidden}, values),
        }
        conv = StateTensor("conv", (channels, c.width - 1), build.dtype)
        delta = StateTensor("delta", (heads.size, c.key_dim, c.value_dim), "float32")
        spec = StateSpec("recurrent", (conv, delta), per="request", every=build.snapshot_every)
        attention = AttentionSpec(heads.size, c.key_dim, c.key_dim**-0.5, dtype=build.dtype, algorithm="gated_delta")
        self.slot: StateSlot = build.state(at, spec, attention)
        self.weights: WeightGroup = build.group(
            DeltaWeights, **linears, norm=norm_weight(build, prefix, "input_layernorm", hidden, common),
            filters=build.weight(conv1d, channels, 1, c.width, sources=[conv1d] * len(filters), spans=filters),
            a_log=build.weight(f"{at}.A_log", heads, dummy="zeros", dtype="float32"),
            dt_bias=build.weight(f"{at}.dt_bias", heads, dummy="ones", dtype="float32"),
            inner_norm=build.weight(f"{at}.norm.weight", c.value_dim, dummy="ones"),
        )  # fmt: skip
        static = {"heads": heads.size, "key_heads": key_heads.size, "key_dim": c.key_dim, "value_dim": c.value_dim,
                  "communicator": build.communicator}  # fmt: skip
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
        heads, kv_heads = build.share_heads(c.heads, c.kv_heads)
        rows = {"q": heads * (2 * dim), "k": kv_heads * dim, "v": kv_heads * dim}
        qkv = {f"{at}.{name}_proj.weight": count for name, count in rows.items()}
        o = {f"{at}.o_proj.weight": hidden}
        q_rows, o_rows = build.linear(f"{at}.qkv_proj", qkv, hidden), build.linear(f"{at}.o_proj", o, heads * dim)
        linears = {"qkv": q_rows, "o": o_rows}
        tensors = tuple(StateTensor(name, (kv_heads.size, dim), build.dtype) for name in ("key", "value"))
        attention = AttentionSpec(heads.size, dim, dim**-0.5, dtype=build.dtype)
        self.slot: StateSlot = build.state(at, StateSpec("full", tensors), attention)
        self.weights: WeightGroup = build.group(
            GatedAttentionWeights, **linears, norm=norm_weight(build, prefix, "input_layernorm", hidden, common),
            cos_sin=c.rotary.table(build), q_norm=norm_weight(build, at, "q_norm", dim, common),
            k_norm=norm_weight(build, at, "k_norm", dim, common),
            qkv_bias=build.biases(qkv, f"{at}.qkv_bias") if c.bias else None,
            o_bias=build.biases(o, f"{at}.o_bias", summed=True) if c.bias else None,
        )  # fmt: skip
        static = {"heads": heads.size, "kv_heads": kv_heads.size, "head_dim": dim, "rotary_dim": c.rotary.dim,
                  "communicator": build.communicator}  # fmt: skip
        self.site: CallSite = build.op("gated_attention_block", at, **common, **static, **linears, state=self.slot)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``; returns the next pair, each [T, hidden]."""
        slot = self.slot
        return self.site.table[step.bucket](  # type: ignore[no-any-return]
            x, residual, step.positions, self.weights.values, slot.views, step.metas[slot.group]
        )
