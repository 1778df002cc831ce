"""The decoder layer that most families share, and a stack of them. A family sets sizes, flags and weight names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from evener.contracts.architecture import Step
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.errors import ArchitectureError
from evener.layers.builder import Builder
from evener.layers.declared import CallSite, Size, Span, Table, Weight, WeightGroup, joined
from evener.layers.experts import MoEConfig
from evener.layers.norms import declare_norm, norm_common, norm_weight, unit_norm
from evener.layers.rotary import LogNConfig, RotaryConfig, TemperatureConfig
from evener.layers.settings import known_activation
from evener.ops.composites import AttentionWeights, MLPWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer. Names are the checkpoint's, relative to the layer, without ``.weight`` and ``.bias``.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: of queries, keys and values.
        rotary: the layer's angles; ``RotaryConfig(0)`` turns nothing.
        window: sliding window in tokens, the query's own among them, or None.
        chunk: tokens of the chunks that attention stays in, or None.
        scale: factor on scores; None is ``head_dim ** -0.5``.
        qkv_bias: whether the projections of queries, keys and values have biases.
        o_bias: whether the output projection has one.
        qk_norm: whether queries and keys are normalised, before they are turned.
        qk_norm_over: "head" each head, "all" all heads together, "each" each head by a layer norm with weights of its
            own, whatever kind the other norms are.
        qk_norms: names of those norms, behind ``at``; with "each", ``{}`` stands for the head's number if they are
            stored one by one; None if they have no weights. Turning whole heads changes no root mean square, so such
            may come after.
        softcap: soft cap on scores, or None.
        sinks: whether each head has a logit that joins its softmax; ``self_attn.sinks`` with the default of ``at``.
        slopes: what a score of each head loses per token of distance (``alibi_slopes``), or None.
        temperature: factors on queries by position, or None.
        at: prefix of its projections and head norms: with the others' defaults ``self_attn.q_proj.weight``.
        qkv: names of the projections of queries, keys and values, in this order; one name if they are stored as one
            tensor, whose rows are in this order.
        o: name of the output projection.
        post_norm: name of a norm after the output projection, before its result is added to the stream; or None.
            Not behind ``at``.
        norm: name of the norm before, or None. Not behind ``at``.
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
    at: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    post_norm: str | None = None
    norm: str | None = "input_layernorm"


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """MLP of one layer. Names are the checkpoint's, relative to the layer, without ``.weight`` and ``.bias``.

    Attributes:
        inner: width between its projections.
        activation: as ``act_and_mul`` and ``activate`` have them.
        gated: whether the activation's result is multiplied with a further projection: activation(gate) * up.
        bias: whether the projections have biases, all or none.
        at: prefix of its projections: with the others' defaults ``mlp.gate_proj.weight``.
        rise: names of gate and up, in this order; one name if they are stored as one tensor, the gate's rows first, or
            if there is no gate.
        fall: name of the projection down.
        parallel: it reads the stream that attention reads, instead of the one that attention has added to. It has
            norms of its own all the same: where one norm serves both halves, give both its name.
        post_norm: name of a norm after it, before its result is added to the stream; or None. Not behind ``at``.
        norm: name of the norm before, or None. Not behind ``at``.
    """

    inner: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    at: str = "mlp"
    rise: tuple[str, ...] = ("gate_proj", "up_proj")
    fall: str = "down_proj"
    parallel: bool = False
    post_norm: str | None = None
    norm: str | None = "post_attention_layernorm"

    def declare(self, build: Builder, prefix: str, common: Mapping[str, Any]) -> tuple[WeightGroup, dict[str, Any]]:
        """The MLP of layer ``prefix``; ``common``: hidden, dtype and norms."""
        at, hidden = f"{prefix}.{self.at}", common["hidden"]
        rise, fall = [f"{at}.{name}.weight" for name in self.rise], [f"{at}.{self.fall}.weight"]
        inner = build.share_inner(self.inner, "inner features of an MLP", rise, fall)
        rise_parts, fall_parts = stored(rise, [inner] * (1 + self.gated)), stored(fall, [hidden])
        gate_up = build.linear(f"{at}.gate_up_proj", rise_parts, hidden)
        down = build.linear(f"{at}.down_proj", fall_parts, inner)
        weights = build.group(
            MLPWeights, norm=norm_weight(build, prefix, self.norm, hidden, common), gate_up=gate_up, down=down,
            gate_up_bias=build.biases(rise_parts, f"{at}.gate_up_bias") if self.bias else None,
            down_bias=build.biases(fall_parts, f"{at}.down_bias", summed=True) if self.bias else None,
            post_norm=norm_weight(build, prefix, self.post_norm, hidden, common),
        )  # fmt: skip
        static = {
            **common, "inner": inner.size, "activation": known_activation(self.activation), "gated": self.gated,
            "gate_up": gate_up, "down": down, "communicator": build.communicator, "pre_norm": self.norm is not None,
            "post_norm": self.post_norm is not None,
        }  # fmt: skip
        return weights, static


def stored(names: Sequence[str], sizes: Sequence[Size]) -> Sequence[tuple[str, Size]]:
    """The parts of a linear weight with these out-features: one a name, or all one after another under one name."""
    if len(names) == len(sizes):
        return tuple(zip(names, sizes, strict=True))
    spans = [size if isinstance(size, Span) else Span(0, size, size) for size in sizes]
    whole, at, behind = sum(span.whole for span in spans), 0, []
    for span in spans:
        behind.append(span.behind(at, whole))
        at += span.whole
    return tuple((name, span) for name in names for span in joined(behind))


class DecoderLayer:
    """Norm, attention, norm, MLP with residual connections: one call of the ``decoder_layer`` composite, or one for
    each half where the second has experts.

    Args:
        build: where it declares itself.
        prefix: the checkpoint's prefix, e.g. "model.layers.3".
        hidden: width of the stream; eps, norm_offset, norm: of all its norms, the last their kind.
    """

    def __init__(
        self, build: Builder, prefix: str, hidden: int, attention: AttentionConfig, mlp: MLPConfig | MoEConfig,
        eps: float, norm_offset: float = 0.0, norm: str = "rms",
    ) -> None:  # fmt: skip
        self._build, self._prefix, self._hidden = build, prefix, hidden
        self._common = norm_common(build, hidden, eps, norm_offset, norm)
        self.attention, attention_static = self._declare_attention(attention)
        op, self.mlp, mlp_static = declare_mlp(build, prefix, mlp, self._common)
        self.sites: tuple[CallSite, ...]
        if isinstance(mlp, MLPConfig):
            both = {"attention": attention_static, "mlp": mlp_static, "hidden": hidden, "dtype": build.dtype}
            self.sites = (build.op("decoder_layer", prefix, **both, parallel=mlp.parallel),)
        else:
            enter = build.op("attention_block", f"{prefix}.self_attn", **attention_static)
            self.sites = (enter, build.op(op, f"{prefix}.mlp", **mlp_static))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``; returns the next pair, each [T, hidden], the residual in float32."""
        state = self.slot.views, step.metas[self.slot.group]
        first = self.sites[0].table[step.bucket]
        if len(self.sites) == 1:
            both = self.attention.values, self.mlp.values
            return first(x, residual, step.positions, *both, *state)  # type: ignore[no-any-return]
        x, residual = first(x, residual, step.positions, self.attention.values, *state)
        return self.sites[1].table[step.bucket](x, residual, self.mlp.values)  # type: ignore[no-any-return]

    def _norm_weight(self, name: str | None, size: int) -> Any:
        return norm_weight(self._build, self._prefix, name, size, self._common)

    def _declare_attention(self, a: AttentionConfig) -> tuple[WeightGroup, dict[str, Any]]:
        build, at = self._build, f"{self._prefix}.{a.at}"
        heads, kv_heads = build.share_heads(a.heads, a.kv_heads)
        rows = [span * a.head_dim for span in (heads, kv_heads, kv_heads)]
        qkv_parts = stored([f"{at}.{name}.weight" for name in a.qkv], rows)
        o_parts = {f"{at}.{a.o}.weight": self._hidden}
        qkv = build.linear(f"{at}.qkv_proj", qkv_parts, self._hidden)
        o = build.linear(f"{at}.o_proj", o_parts, heads * a.head_dim)
        tensors = tuple(StateTensor(name, (kv_heads.size, a.head_dim), build.dtype) for name in ("key", "value"))
        kind = "chunk" if a.chunk else "window" if a.window else "full"
        scale = a.head_dim**-0.5 if a.scale is None else a.scale
        if a.slopes is not None and len(a.slopes) != a.heads:
            raise ArchitectureError(f"{at}: {len(a.slopes)} slopes for {a.heads} heads; give one for each")
        slopes = a.slopes and a.slopes[heads.start : heads.stop]
        reads = AttentionSpec(heads.size, a.head_dim, scale, a.softcap, a.sinks, build.dtype, slopes=slopes)
        self.slot = build.state(at, StateSpec(kind, tensors, window=a.chunk or a.window), reads)
        weights = build.group(
            AttentionWeights, norm=self._norm_weight(a.norm, self._hidden), qkv=qkv, o=o,
            cos_sin=a.rotary.table(build),
            qkv_bias=build.biases(qkv_parts, f"{at}.qkv_bias") if a.qkv_bias else None,
            o_bias=build.biases(o_parts, f"{at}.o_bias", summed=True) if a.o_bias else None,
            q_norm=self._head_norm(a, 0, heads) if a.qk_norm else None,
            k_norm=self._head_norm(a, 1, kv_heads) if a.qk_norm else None,
            sinks=build.weight(f"{at}.sinks", heads, dummy="zeros") if a.sinks else None,
            query_scale=a.temperature.table(build) if a.temperature else None,
            post_norm=self._norm_weight(a.post_norm, self._hidden),
        )  # fmt: skip
        static = {
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
            return unit_norm(build, a.head_dim, self._common)
        name = f"{self._prefix}.{a.at}.{a.qk_norms[index]}"
        if a.qk_norm_over == "head":
            return declare_norm(build, name, a.head_dim, self._common)
        if a.qk_norm_over not in ("all", "each"):
            raise ArchitectureError(f'{name}: qk_norm_over is {a.qk_norm_over!r}; it is "head", "each" or "all"')
        if a.qk_norm_over == "all":
            if build.ranks > 1 and self._common["norm"] != "rms":
                raise build.misfit(f"{name} is a layer norm of all heads together, which one rank must have", [1])
            return declare_norm(build, name, heads * a.head_dim, self._common)
        if "{}" not in name:
            return build.weight(f"{name}.weight", heads, a.head_dim, dummy="ones")
        every = [f"{name.format(head)}.weight" for head in range(heads.whole)]
        build.ignored += map(re.escape, (*every[: heads.start], *every[heads.stop :]))
        own = every[heads.start : heads.stop]
        return build.weight(f"{name}.weight", heads.size * a.head_dim, dummy="ones", sources=own)


def declare_mlp(
    build: Builder, prefix: str, mlp: MLPConfig | MoEConfig, common: Mapping[str, Any]
) -> tuple[str, WeightGroup, dict[str, Any]]:
    """The second half of layer ``prefix``: its op, weights and static parameters. ``common``: hidden, dtype, eps and
    offset of its norms."""
    op = "mlp_block" if isinstance(mlp, MLPConfig) else "moe_block"
    return op, *mlp.declare(build, prefix, common)


class Mixer(Protocol):
    """The first half of a layer: norm, whatever mixes tokens, output projection."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class MixerConfig(Protocol):
    """What declares a mixer."""

    def declare(self, build: Builder, prefix: str, common: Mapping[str, Any]) -> Mixer:
        """The mixer of layer ``prefix``; ``common``: hidden, dtype, eps and offset of its norms."""


class MixerLayer(DecoderLayer):
    """A layer whose first half is any mixer: two calls, the mixer's own and the other half's."""

    def __init__(
        self, build: Builder, prefix: str, hidden: int, mixer: MixerConfig, mlp: MLPConfig | MoEConfig, eps: float,
        norm_offset: float = 0.0, norm: str = "rms",
    ) -> None:  # fmt: skip
        self._build, self._prefix, self._hidden = build, prefix, hidden
        self._common = norm_common(build, hidden, eps, norm_offset, norm)
        if isinstance(mlp, MLPConfig) and mlp.parallel:
            raise ArchitectureError(f"{prefix}: an MLP beside its mixer is implemented for AttentionConfig only")
        self.mixer = mixer.declare(build, prefix, self._common)
        op, self.mlp, static = declare_mlp(build, prefix, mlp, self._common)
        self.sites = (build.op(op, f"{prefix}.mlp", **static),)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.mixer(x, residual, step)
        return self.sites[0].table[step.bucket](x, residual, self.mlp.values)  # type: ignore[no-any-return]


class DecoderStack:
    """Layers one after another. What they add up is kept in float32: rounding it at each layer costs more accuracy than
    all other roundings of a 16-bit type together."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = tuple(layers)

    def __call__(self, x: torch.Tensor, step: Step, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] in, and what is added to it; the whole stream [T, hidden] in float32 out."""
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        return x.float() if residual is None else x + residual
