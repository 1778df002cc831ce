"""Token mixers of hybrid models such as Qwen3-Next: a gated delta net, and attention with an output gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.contracts.architecture import Step
from evener.contracts.declared import CallSite, StateSlot, WeightGroup
from evener.contracts.sizes import merge_spans
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.contracts.statics import DeltaStatic, GatedAttentionStatic, NormStatic
from evener.contracts.weights import DeltaWeights, GatedAttentionWeights
from evener.layers.builder import Builder
from evener.layers.norms import norm_weight
from evener.layers.rotary import RotaryConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta net (Yang et al. 2024) of one layer. In brackets: the key in Qwen3-Next's ``config.json``.

    Attributes:
        heads: value heads (``linear_num_value_heads``), a multiple of the key heads.
        key_heads: query and key heads (``linear_num_key_heads``).
        key_dim: width of a head's query and key (``linear_key_head_dim``).
        value_dim: width of a head's value (``linear_value_head_dim``).
        width: tokens that the causal convolution sees (``linear_conv_kernel_dim``).
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int

    def declare(self, build: Builder, prefix: str, common: NormStatic) -> DeltaNet:
        """Declare the mixer of layer ``prefix``; ``common`` are the static parameters that the layer's blocks share."""
        return DeltaNet(build, prefix, common, self)


class DeltaNet:
    """Norm, gated delta net and output projection: one call of ``delta_block``."""

    def __init__(self, build: Builder, prefix: str, common: NormStatic, c: DeltaConfig) -> None:
        module, hidden = f"{prefix}.linear_attn", common["hidden"]
        key_heads, _ = build.shard_heads(c.key_heads, c.key_heads)
        heads = key_heads * (c.heads // c.key_heads)
        keys, values = key_heads * c.key_dim, heads * c.value_dim
        whole, channels = 2 * keys.whole + values.whole, 2 * keys.size + values.size
        # in_proj_qkvz holds the queries, keys, values and gates of one key head side by side. In conv1d, all queries
        # come first, then all keys, then all values.
        in_parts = {
            f"{module}.in_proj_qkvz.weight": key_heads * ((whole + values.whole) // c.key_heads),
            f"{module}.in_proj_ba.weight": heads * 2,
        }
        first = keys.shifted(0, whole), keys.shifted(keys.whole, whole), values.shifted(2 * keys.whole, whole)
        filters, conv1d = merge_spans(first), f"{module}.conv1d.weight"
        in_proj = build.linear(f"{module}.in_proj", in_parts, hidden)
        o = build.linear(f"{module}.out_proj", {f"{module}.out_proj.weight": hidden}, values)
        conv = StateTensor("conv", (channels, c.width - 1), build.dtype)
        delta = StateTensor("delta", (heads.size, c.key_dim, c.value_dim), "float32")
        spec = StateSpec("recurrent", (conv, delta), per="request", every=build.snapshot_every)
        attention = AttentionSpec(heads.size, c.key_dim, c.key_dim**-0.5, dtype=build.dtype, algorithm="gated_delta")
        self.slot: StateSlot = build.state(module, spec, attention)
        self.weights: WeightGroup = build.group(
            DeltaWeights, in_proj=in_proj, o=o, norm=norm_weight(build, prefix, "input_layernorm", hidden, common),
            filters=build.weight(conv1d, channels, 1, c.width, sources=[conv1d] * len(filters), spans=filters),
            a_log=build.weight(f"{module}.A_log", heads, dummy="zeros", dtype="float32"),
            dt_bias=build.weight(f"{module}.dt_bias", heads, dummy="ones", dtype="float32"),
            inner_norm=build.weight(f"{module}.norm.weight", c.value_dim, dummy="ones"),
        )  # fmt: skip
        static: DeltaStatic = {
            **common, "heads": heads.size, "key_heads": key_heads.size, "key_dim": c.key_dim, "value_dim": c.value_dim,
            "communicator": build.communicator, "in_proj": in_proj, "o": o, "state": self.slot,
        }  # fmt: skip
        self.site: CallSite = build.op("delta_block", module, **static)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``. Returns the next such pair, each [T, hidden]."""
        slot = self.slot
        return self.site.table[step.bucket](  # type: ignore[no-any-return]
            x, residual, self.weights.values, slot.views, step.metas[slot.group]
        )


@dataclass(frozen=True, kw_only=True)
class GatedAttentionConfig:
    """Attention with an output gate (Qiu et al. 2025) and head norms, of one layer. ``q_proj`` makes the gates too.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        rotary: rotary position embedding.
        bias: whether all projections have biases.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    bias: bool = False

    def declare(self, build: Builder, prefix: str, common: NormStatic) -> GatedAttention:
        """Declare the mixer of layer ``prefix``; ``common`` are the static parameters that the layer's blocks share."""
        return GatedAttention(build, prefix, common, self)


class GatedAttention:
    """Norm, gated attention and output projection: one call of ``gated_attention_block``."""

    def __init__(self, build: Builder, prefix: str, common: NormStatic, c: GatedAttentionConfig) -> None:
        module, hidden, dim = f"{prefix}.self_attn", common["hidden"], c.head_dim
        heads, kv_heads = build.shard_heads(c.heads, c.kv_heads)
        rows = {"q": heads * (2 * dim), "k": kv_heads * dim, "v": kv_heads * dim}
        qkv_parts = {f"{module}.{name}_proj.weight": count for name, count in rows.items()}
        o_parts = {f"{module}.o_proj.weight": hidden}
        qkv = build.linear(f"{module}.qkv_proj", qkv_parts, hidden)
        o = build.linear(f"{module}.o_proj", o_parts, heads * dim)
        tensors = tuple(StateTensor(name, (kv_heads.size, dim), build.dtype) for name in ("key", "value"))
        attention = AttentionSpec(heads.size, dim, dim**-0.5, dtype=build.dtype)
        self.slot: StateSlot = build.state(module, StateSpec("full", tensors), attention)
        self.weights: WeightGroup = build.group(
            GatedAttentionWeights, qkv=qkv, o=o, norm=norm_weight(build, prefix, "input_layernorm", hidden, common),
            cos_sin=c.rotary.table(build, dim), q_norm=norm_weight(build, module, "q_norm", dim, common),
            k_norm=norm_weight(build, module, "k_norm", dim, common),
            qkv_bias=build.biases(qkv_parts, f"{module}.qkv_bias") if c.bias else None,
            o_bias=build.biases(o_parts, f"{module}.o_bias", summed=True) if c.bias else None,
        )  # fmt: skip
        static: GatedAttentionStatic = {
            **common, "heads": heads.size, "kv_heads": kv_heads.size, "head_dim": dim, "rotary_dim": c.rotary.dim,
            "communicator": build.communicator, "qkv": qkv, "o": o, "state": self.slot,
        }  # fmt: skip
        self.site: CallSite = build.op("gated_attention_block", module, **static)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``. Returns the next such pair, each [T, hidden]."""
        slot = self.slot
        return self.site.table[step.bucket](  # type: ignore[no-any-return]
            x, residual, step.positions, self.weights.values, slot.views, step.metas[slot.group]
        )
