"""A layer of an encoder of texts, and the head for a label. Ranks share heads and inner features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.contracts.architecture import Step
from evener.contracts.sizes import Size
from evener.contracts.state import AttentionSpec, StateSpec
from evener.layers import Builder, RotaryConfig
from evener.layers.decoder import linear_parts
from evener_encoders.whole import KIND, WholeTextProvider

if TYPE_CHECKING:
    import torch

Parts = Mapping[str, Size] | Sequence[tuple[str, Size]]


class Norm:
    """A layer norm of the float32 stream: ``name.weight`` and, with ``bias``, ``name.bias``."""

    def __init__(self, build: Builder, name: str, width: int, eps: float, bias: bool = True) -> None:
        self._weight = build.weight(f"{name}.weight", width, dummy="ones", dtype="float32")
        self._bias = build.weight(f"{name}.bias", width, dummy="zeros", dtype="float32") if bias else None
        self._site = build.op("layer_norm", name, hidden=width, dtype="float32", eps=eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """From float32 [T, width] to the same."""
        bias = None if self._bias is None else self._bias.value
        return self._site.at(len(x))(x, self._weight.value, bias)  # type: ignore[no-any-return]


class Linear:
    """A linear layer of one or more stored parts, in the compute dtype.

    Args:
        build: the builder to declare it to.
        name: of the whole.
        parts: as ``Builder.linear`` takes them.
        columns: in-features; of a Span, the products are summed over the ranks.
        bias: whether each part has a bias.
        out: dtype of the result; default: the compute dtype.
    """

    def __init__(self, build: Builder, name: str, parts: Parts, columns: Size, bias: bool, out: str = "") -> None:
        summed = not isinstance(columns, int) and build.communicator is not None
        self._weight = build.linear(name, parts, columns, out or None)
        self._bias = build.biases(parts, f"{name}.bias", summed) if bias else None
        rows, width = self._weight.rows, self._weight.columns
        dtype = {"dtype": build.dtype, "out": out or build.dtype}
        self._site = build.op("linear", name, weight=self._weight, rows=rows, columns=width, **dtype)
        ranks = {"communicator": build.communicator, "hidden": rows, "dtype": build.dtype}
        self._sum = build.op("all_reduce", name, **ranks) if summed else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """From [T, columns] to [T, rows]."""
        bias = None if self._bias is None else self._bias.value
        y: torch.Tensor = self._site.at(len(x))(x, self._weight.value, bias)
        return y if self._sum is None else self._sum.at(len(x))(y)


@dataclass(frozen=True, kw_only=True)
class EncoderLayerConfig:
    """One layer: attention and an MLP, each with a residual connection and a norm.

    Attributes:
        hidden, heads, inner: width of the stream, attention heads, width inside the MLP.
        eps: of the norms.
        activation: one that the ops ``activate`` and ``act_and_mul`` know.
        window: how far away the tokens are that attention reads, on both sides; None: it reads all.
        rotary: position embedding of queries and keys; None: there is none.
        norm_first: whether norms come before attention and MLP, and not after each residual connection.
        gated: whether the MLP is activation(first half) * second half.
        attention_bias, mlp_bias, norm_bias: what has biases.
        qkv: names of the projections of queries, keys and values; one name if they are stored as one tensor.
        o, up, down: names of the output projection, and of the MLP's two.
        norms: names of the norms of attention and MLP; None: there is none.
    """

    hidden: int
    heads: int
    inner: int
    eps: float
    activation: str
    window: int | None = None
    rotary: RotaryConfig | None = None
    norm_first: bool = False
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    qkv: Sequence[str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    o: str = "attention.output.dense"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norms: tuple[str | None, str | None] = ("attention.output.LayerNorm", "output.LayerNorm")


class EncoderLayer:
    """The layer ``prefix`` of a config. Its stream is kept in float32, as that of decoder layers."""

    def __init__(self, build: Builder, prefix: str, c: EncoderLayerConfig) -> None:
        self._config = c
        heads, _ = build.shard_heads(c.heads, c.heads)
        self._sizes = (3, heads.size, dim := c.hidden // c.heads)
        qkv = linear_parts([f"{prefix}.{name}.weight" for name in c.qkv], [heads * dim] * 3)
        self._qkv = Linear(build, f"{prefix}.qkv", qkv, c.hidden, c.attention_bias)
        self._o = Linear(build, f"{prefix}.{c.o}", {f"{prefix}.{c.o}.weight": c.hidden}, heads * dim, c.attention_bias)
        names = [f"{prefix}.{name}.weight" for name in (c.up, c.down)]
        inner = build.shard_inner(c.inner, "inner features of an MLP", names[:1], names[1:])
        up = linear_parts(names[:1], [inner] * (1 + c.gated))
        self._up = Linear(build, f"{prefix}.{c.up}", up, c.hidden, c.mlp_bias)
        self._down = Linear(build, f"{prefix}.{c.down}", {names[1]: c.hidden}, inner, c.mlp_bias)
        op, sizes = "act_and_mul" if c.gated else "activate", {"inner": inner.size, "dtype": build.dtype}
        self._activate = build.op(op, prefix, activation=c.activation, **sizes)
        self._norms = [
            None if name is None else Norm(build, f"{prefix}.{name}", c.hidden, c.eps, c.norm_bias) for name in c.norms
        ]
        self._rotary = self._table = None
        if c.rotary is not None:
            turned = {"head_dim": dim, "rotary_dim": c.rotary.dim, "interleaved": c.rotary.interleaved}
            self._table = c.rotary.table(build, dim)
            self._rotary = build.op("rotary", prefix, **turned, dtype=build.dtype)
        reads = AttentionSpec(heads.size, dim, dim**-0.5, dtype=build.dtype)
        self.slot = build.state(f"{prefix}.attention", StateSpec(KIND, (), window=c.window), reads)
        self._dtype = build.dtype

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """From the stream float32 [T, hidden] to the next."""
        first = self._config.norm_first
        for part, norm in zip((self._attention, self._mlp), self._norms, strict=True):
            before = norm(x) if first and norm is not None else x
            x = x + part(before.to(self._torch_dtype), step).float()
            x = norm(x) if not first and norm is not None else x
        return x

    @property
    def _torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self._dtype)  # type: ignore[no-any-return]

    def _attention(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        q, k, v = self._qkv(x).unflatten(-1, self._sizes).unbind(1)
        if self._rotary is not None:
            assert self._table is not None, "both are declared together"
            turned = (part.contiguous() for part in (q, k))  # they are donated
            q, k = self._rotary.table[step.bucket](step.positions, *turned, self._table.value)
        provider = self.slot.provider
        assert isinstance(provider, WholeTextProvider), "the kind has this interface"
        return self._o(provider.attend(step.metas[self.slot.group], q, k, v).flatten(1))

    def _mlp(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self._down(self._activate.table[step.bucket](self._up(x)))


class LabelHead:
    """What makes the logit of one label from a pooled row: dense, activation, (norm), projection.

    Args:
        build: the builder to declare it to; every rank holds all of it.
        names: of the dense layer and of the projection.
        width: of the row.
        activation: "tanh", or one that the op ``activate`` knows.
        bias: whether the dense layer has a bias.
        norm: the norm after the activation; None: there is none.
    """

    def __init__(
        self, build: Builder, names: tuple[str, str], width: int, activation: str, bias: bool = True,
        norm: Norm | None = None,
    ) -> None:  # fmt: skip
        dense, last = names
        self._dense = Linear(build, dense, {f"{dense}.weight": width}, width, bias)
        self._last = Linear(build, last, {f"{last}.weight": 1}, width, True, "float32")
        sizes = {"inner": width, "activation": activation, "dtype": build.dtype}
        self._activate = None if activation == "tanh" else build.op("activate", dense, **sizes)
        self._norm, self._dtype = norm, build.dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits float32 [R, 1] of rows float32 [R, width]."""
        import torch

        dtype = getattr(torch, self._dtype)
        x = self._dense(rows.to(dtype))
        x = torch.tanh(x) if self._activate is None else self._activate.at(len(x))(x)
        return self._last(x if self._norm is None else self._norm(x.float()).to(dtype))
