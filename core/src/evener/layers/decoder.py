"""The decoder layer that most families share, and a stack of layers. A family sets sizes, flags and weight names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from evener.contracts.architecture import Step
from evener.contracts.declared import CallSite, Span, Table, Weight, WeightGroup
from evener.contracts.sizes import Size, merge_spans
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.contracts.statics import AttentionStatic, DecoderLayerStatic, MLPStatic, NormStatic
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener.errors import ArchitectureError
from evener.layers.builder import Builder
from evener.layers.config_json import known_activation
from evener.layers.experts import MoEConfig
from evener.layers.norms import declare_norm, norm_common, norm_weight, ones_norm_weight
from evener.layers.rotary import LogNConfig, RotaryConfig, TemperatureConfig, query_factors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer. Names are the checkpoint's, relative to the layer, without ``.weight`` and ``.bias``.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads (grouped-query attention; 1: multi-query).
        head_dim: width of a head's query, key and value.
        rotary: rotary position embedding; ``RotaryConfig(0)``: none.
        window: sliding window in tokens, the query's own token included, or None.
        chunk: chunk size in tokens: a query reads its own chunk only; or None.
        scale: factor on the scores; None: ``head_dim ** -0.5``.
        qkv_bias: whether the projections of queries, keys and values have biases.
        o_bias: whether the output projection has a bias.
        qk_norm: whether queries and keys are normalized, before rotary embedding.
        qk_norm_over: "head": each head by itself, all with the same weights; "all": all heads together; "each": each
            head by a layer norm with its own weights, whatever kind the other norms are.
        qk_norms: names of the norms of queries and keys, after ``prefix``; with "each", ``{}`` stands for the head's
            number if they are stored one by one. None: they have no weights. Such a norm of whole rotated heads gives
            the same result before and after rotary embedding.
        softcap: soft cap on the scores (Gemma 2), or None.
        sinks: whether each head has a logit that takes part in its softmax (gpt-oss); it is called ``sinks``, after
            ``prefix``.
        slopes: ALiBi: what a score loses per token of distance, for each head; or None.
        temperature: factors on queries by position, or None.
        prefix: of the projections and head norms: with the defaults of the other names ``self_attn.q_proj.weight``.
        qkv: names of the projections of queries, keys and values, in this order; one name if they are stored as one
            tensor, with its rows in this order.
        o: name of the output projection.
        post_norm: name of a norm after the output projection, before the residual connection; or None. It does not
            follow ``prefix``.
        norm: name of the norm before attention, or None. It does not follow ``prefix``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: str = "head"
    qk_norms: tuple[str, str] | None = ("q_norm", "k_norm")
    softcap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None
    temperature: TemperatureConfig | LogNConfig | None = None
    prefix: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    post_norm: str | None = None
    norm: str | None = "input_layernorm"


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """MLP of one layer. Names are the checkpoint's, relative to the layer, without ``.weight`` and ``.bias``.

    Attributes:
        inner: width between the projections (``intermediate_size``).
        activation: one that the ops ``act_and_mul`` and ``activate`` know.
        gated: whether it is a gated MLP, activation(gate) * up (Shazeer 2020), instead of activation(up).
        bias: whether all projections have biases.
        prefix: of the projections: with the defaults of the other names ``mlp.gate_proj.weight``.
        gate_up: names of gate and up, in this order; one name if they are stored as one tensor with the gate's rows
            first, or if there is no gate.
        down: name of the down projection.
        parallel: whether the MLP reads the same residual stream as attention, instead of the stream to which attention
            has added its result. It still declares its own norm: if the checkpoint has one norm for both, give both the
            same name.
        post_norm: name of a norm after the MLP, before the residual connection; or None. It does not follow ``prefix``.
        norm: name of the norm before the MLP, or None. It does not follow ``prefix``.
    """

    inner: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    prefix: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    parallel: bool = False
    post_norm: str | None = None
    norm: str | None = "post_attention_layernorm"

    def declare(self, build: Builder, prefix: str, common: NormStatic) -> tuple[WeightGroup, MLPStatic]:
        """Declare the MLP of layer ``prefix``: its weights, and the static parameters of its ``mlp_block``."""
        module, hidden = f"{prefix}.{self.prefix}", common["hidden"]
        gate_up_names = [f"{module}.{name}.weight" for name in self.gate_up]
        down_names = [f"{module}.{self.down}.weight"]
        inner = build.shard_inner(self.inner, "inner features of an MLP", gate_up_names, down_names)
        gate_up_parts = linear_parts(gate_up_names, [inner] * (1 + self.gated))
        down_parts = linear_parts(down_names, [hidden])
        gate_up = build.linear(f"{module}.gate_up_proj", gate_up_parts, hidden)
        down = build.linear(f"{module}.down_proj", down_parts, inner)
        weights = build.group(
            MLPWeights, norm=norm_weight(build, prefix, self.norm, hidden, common), gate_up=gate_up, down=down,
            gate_up_bias=build.biases(gate_up_parts, f"{module}.gate_up_bias") if self.bias else None,
            down_bias=build.biases(down_parts, f"{module}.down_bias", summed=True) if self.bias else None,
            post_norm=norm_weight(build, prefix, self.post_norm, hidden, common),
        )  # fmt: skip
        static: MLPStatic = {
            **common, "inner": inner.size, "activation": known_activation(self.activation), "gated": self.gated,
            "bias": self.bias, "gate_up": gate_up, "down": down, "communicator": build.communicator,
            "pre_norm": self.norm is not None, "post_norm": self.post_norm is not None,
        }  # fmt: skip
        return weights, static


def linear_parts(names: Sequence[str], sizes: Sequence[Size]) -> Sequence[tuple[str, Size]]:
    """The parts of a linear weight with these out-features: one per name, or all of them under one name, in order."""
    if len(names) == len(sizes):
        return tuple(zip(names, sizes, strict=True))
    spans = [size if isinstance(size, Span) else Span(0, size, size) for size in sizes]
    whole, at, behind = sum(span.whole for span in spans), 0, []
    for span in spans:
        behind.append(span.shifted(at, whole))
        at += span.whole
    return tuple((name, span) for name in names for span in merge_spans(behind))


class DecoderLayer:
    """Norm, attention, norm, MLP, with residual connections: one call of the composite ``decoder_layer``; with experts
    instead of an MLP, one call of ``attention_block`` and one of ``moe_block``.

    Args:
        build: the builder to declare it to.
        prefix: the checkpoint's prefix, e.g. "model.layers.3".
        hidden: width of the residual stream.
        attention, mlp: the two halves.
        eps: of all norms of the layer.
        norm_offset: added to the weights of its norms.
        norm: kind of its norms, as in ``CausalLM``.
    """

    def __init__(
        self, build: Builder, prefix: str, hidden: int, attention: AttentionConfig, mlp: MLPConfig | MoEConfig,
        eps: float, norm_offset: float = 0.0, norm: str = "rms",
    ) -> None:  # fmt: skip
        self._build, self._prefix, self._hidden = build, prefix, hidden
        self._common = norm_common(build, hidden, eps, norm_offset, norm)
        self.attention, attention_static = self._declare_attention(attention)
        self.sites: tuple[CallSite, ...]
        if isinstance(mlp, MLPConfig):
            self.mlp, mlp_static = mlp.declare(build, prefix, self._common)
            static: DecoderLayerStatic = {
                "attention": attention_static, "mlp": mlp_static, "hidden": hidden, "dtype": build.dtype,
                "parallel": mlp.parallel,
            }  # fmt: skip
            self.sites = (build.op("decoder_layer", prefix, **static),)
        else:
            enter = build.op("attention_block", f"{prefix}.self_attn", **attention_static)
            self.mlp, moe_static = mlp.declare(build, prefix, self._common)
            self.sites = (enter, build.op("moe_block", f"{prefix}.mlp", **moe_static))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``. Returns the next such pair, each [T, hidden], the residual in float32."""
        state = self.slot.views, step.metas[self.slot.group]
        first = self.sites[0].table[step.bucket]
        if len(self.sites) == 1:
            both = self.attention.values, self.mlp.values
            return first(x, residual, step.positions, *both, *state)  # type: ignore[no-any-return]
        x, residual = first(x, residual, step.positions, self.attention.values, *state)
        return self.sites[1].table[step.bucket](x, residual, self.mlp.values)  # type: ignore[no-any-return]

    def _norm_weight(self, name: str | None, size: int) -> Any:
        return norm_weight(self._build, self._prefix, name, size, self._common)

    def _declare_attention(self, a: AttentionConfig) -> tuple[WeightGroup, AttentionStatic]:
        build, module = self._build, f"{self._prefix}.{a.prefix}"
        heads, kv_heads = build.shard_heads(a.heads, a.kv_heads)
        rows = [span * a.head_dim for span in (heads, kv_heads, kv_heads)]
        qkv_parts = linear_parts([f"{module}.{name}.weight" for name in a.qkv], rows)
        o_parts = {f"{module}.{a.o}.weight": self._hidden}
        qkv = build.linear(f"{module}.qkv_proj", qkv_parts, self._hidden)
        o = build.linear(f"{module}.o_proj", o_parts, heads * a.head_dim)
        tensors = tuple(StateTensor(name, (kv_heads.size, a.head_dim), build.dtype) for name in ("key", "value"))
        kind = "chunk" if a.chunk else "window" if a.window else "full"
        scale = a.head_dim**-0.5 if a.scale is None else a.scale
        if a.slopes is not None and len(a.slopes) != a.heads:
            raise ArchitectureError(f"{module}: {len(a.slopes)} slopes for {a.heads} heads; give one per head")
        slopes = a.slopes and a.slopes[heads.start : heads.stop]
        reads = AttentionSpec(heads.size, a.head_dim, scale, a.softcap, a.sinks, build.dtype, slopes=slopes)
        self.slot = build.state(module, StateSpec(kind, tensors, window=a.chunk or a.window), reads)
        weights = build.group(
            AttentionWeights, norm=self._norm_weight(a.norm, self._hidden), qkv=qkv, o=o,
            cos_sin=a.rotary.table(build, a.head_dim),
            qkv_bias=build.biases(qkv_parts, f"{module}.qkv_bias") if a.qkv_bias else None,
            o_bias=build.biases(o_parts, f"{module}.o_bias", summed=True) if a.o_bias else None,
            q_norm=self._head_norm(a, 0, heads) if a.qk_norm else None,
            k_norm=self._head_norm(a, 1, kv_heads) if a.qk_norm else None,
            sinks=build.weight(f"{module}.sinks", heads, dummy="zeros") if a.sinks else None,
            query_scale=query_factors(build, a.temperature) if a.temperature else None,
            post_norm=self._norm_weight(a.post_norm, self._hidden),
        )  # fmt: skip
        static: AttentionStatic = {
            **self._common, "heads": heads.size, "kv_heads": kv_heads.size, "head_dim": a.head_dim,
            "value_dim": a.head_dim, "rotary_dim": a.rotary.dim, "interleaved": a.rotary.interleaved,
            "qk_norm": a.qk_norm, "qk_norm_over": a.qk_norm_over, "state": self.slot, "qkv": qkv, "o": o,
            "qk_norm_ranks": build.communicator if a.qk_norm and a.qk_norm_over == "all" else None,
            "post_norm": a.post_norm is not None, "query_scale": a.temperature is not None,
            "communicator": build.communicator, "pre_norm": a.norm is not None,
        }  # fmt: skip
        return weights, static

    def _head_norm(self, a: AttentionConfig, index: int, heads: Span) -> Weight | Table | None:
        build = self._build
        if a.qk_norms is None:
            return ones_norm_weight(build, a.head_dim, self._common)
        name = f"{self._prefix}.{a.prefix}.{a.qk_norms[index]}"
        if a.qk_norm_over == "head":
            return declare_norm(build, name, a.head_dim, self._common)
        if a.qk_norm_over not in ("all", "each"):
            raise ArchitectureError(f'{name}: qk_norm_over is {a.qk_norm_over!r}; it is "head", "each" or "all"')
        if a.qk_norm_over == "all":
            if build.ranks > 1 and self._common["norm"] != "rms":
                raise build.tp_size_error(f"{name} is a layer norm over all heads, which ranks cannot share", [1])
            return declare_norm(build, name, heads * a.head_dim, self._common)
        if "{}" not in name:
            return build.weight(f"{name}.weight", heads, a.head_dim, dummy="ones")
        every = [f"{name.format(head)}.weight" for head in range(heads.whole)]
        build.ignored += map(re.escape, (*every[: heads.start], *every[heads.stop :]))
        own = every[heads.start : heads.stop]
        return build.weight(f"{name}.weight", heads.size * a.head_dim, dummy="ones", sources=own)


class Mixer(Protocol):
    """The first half of a layer: norm, attention or another token mixer, output projection."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class MixerConfig(Protocol):
    """Describes a mixer, and declares it."""

    def declare(self, build: Builder, prefix: str, common: NormStatic) -> Mixer:
        """Declare the mixer of layer ``prefix``; ``common`` are the static parameters that the layer's blocks share."""


class MixerLayer(DecoderLayer):
    """A layer whose first half is any mixer: the mixer's own call, then one of ``mlp_block`` or ``moe_block``."""

    def __init__(
        self, build: Builder, prefix: str, hidden: int, mixer: MixerConfig, mlp: MLPConfig | MoEConfig, eps: float,
        norm_offset: float = 0.0, norm: str = "rms",
    ) -> None:  # fmt: skip
        self._build, self._prefix, self._hidden = build, prefix, hidden
        self._common = norm_common(build, hidden, eps, norm_offset, norm)
        if isinstance(mlp, MLPConfig) and mlp.parallel:
            raise ArchitectureError(f"{prefix}: a parallel MLP is implemented for AttentionConfig only")
        self.mixer = mixer.declare(build, prefix, self._common)
        self.mlp, static = mlp.declare(build, prefix, self._common)
        self.sites = (build.op("mlp_block" if isinstance(mlp, MLPConfig) else "moe_block", f"{prefix}.mlp", **static),)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.mixer(x, residual, step)
        return self.sites[0].table[step.bucket](x, residual, self.mlp.values)  # type: ignore[no-any-return]


class DecoderStack:
    """Layers one after another. The residual stream is kept in float32: rounding it at each layer costs more accuracy
    than all other roundings of a 16-bit dtype together.

    Attributes:
        taps: for a drafter: by the number of a layer, the stream before that layer in the last step, float32 [T,
            hidden]. A drafter adds the keys.
    """

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers, self.taps = tuple(layers), dict[int, Any]()

    def __call__(self, x: torch.Tensor, step: Step, residual: torch.Tensor | None = None) -> torch.Tensor:
        """From ``x`` [T, hidden] and the residual to add to it, or None, to the stream [T, hidden] in float32."""
        for number, layer in enumerate(self.layers):
            if number in self.taps:
                self.taps[number] = x.float().clone() if residual is None else x + residual
            x, residual = layer(x, residual, step)
        return x.float() if residual is None else x + residual
