"""Layers of encoders, e.g. of images: attention is not causal, and there is no state. Every rank holds them whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.contracts.declared import Span
from evener.contracts.sizes import Size
from evener.layers.builder import Builder

if TYPE_CHECKING:
    import torch


class Norm:
    """A layer norm with a bias: ``name.weight`` and ``name.bias``."""

    def __init__(self, build: Builder, name: str, width: int, eps: float) -> None:
        self._weight = build.weight(f"{name}.weight", width, dummy="ones")
        self._bias = build.weight(f"{name}.bias", width, dummy="zeros")
        self._site = build.op("layer_norm", name, hidden=width, dtype=build.dtype, eps=eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """From [T, width] to [T, width]."""
        return self._site.at(len(x))(x, self._weight.value, self._bias.value)  # type: ignore[no-any-return]


class Projection:
    """A linear layer.

    Args:
        build: the builder to declare it to.
        name: of the layer.
        rows: out-features; of a Span, that part of the stored tensor is read.
        columns: in-features.
        weight: name of the checkpoint tensor; default: ``name.weight``.
        bias: name of the bias in the checkpoint; default: ``name.bias``; None: it has none.
    """

    def __init__(
        self, build: Builder, name: str, rows: Size, columns: int, weight: str = "", bias: str | None = ""
    ) -> None:
        self._weight = build.linear(name, {weight or f"{name}.weight": rows}, columns)
        self._bias = None
        if bias is not None:
            spans = [rows] if isinstance(rows, Span) else []
            source = bias or f"{name}.bias"
            self._bias = build.weight(f"{name}.bias", rows, dummy="zeros", sources=[source], spans=spans)
        sizes = {"rows": self._weight.rows, "columns": columns}
        self._site = build.op("linear", name, weight=self._weight, **sizes, dtype=build.dtype, out=build.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """From [T, columns] to [T, rows]."""
        bias = None if self._bias is None else self._bias.value
        return self._site.at(len(x))(x, self._weight.value, bias)  # type: ignore[no-any-return]


class Attention:
    """One call of ``encode_attention``; the heads lie side by side."""

    def __init__(self, build: Builder, name: str, width: int, heads: int) -> None:
        self._sizes = heads, width // heads
        static = {"heads": heads, "head_dim": width // heads, "scale": (width // heads) ** -0.5}
        self._site = build.op("encode_attention", name, **static, dtype=build.dtype)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """From query [T, width], key and value [S, width] (or [.., heads, head_dim]) to [T, width]."""
        parts = (part.unflatten(-1, self._sizes) if part.dim() == 2 else part for part in (query, key, value))
        return self._site.at(len(query))(*parts).flatten(1)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A stack of layers: norm, attention, norm, MLP without a gate, all with biases.

    Attributes:
        layers: number of layers.
        width: of the rows.
        heads: attention heads.
        inner: width between the MLP's projections.
        eps: of the norms.
        prefix: of the layers; their numbers follow.
        activation: one that the op ``activate`` knows.
        names: of both norms, the fused query, key and value projection, the output projection, and the MLP's two.
        by_head: whether the fused projection has query, key and value of one head side by side, instead of all
            queries, then all keys, then all values.
    """

    layers: int
    width: int
    heads: int
    inner: int
    eps: float
    prefix: str
    activation: str = "gelu"
    names: Sequence[str] = ("ln_1", "ln_2", "attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
    by_head: bool = False


class EncoderStack:
    """The layers of a config, one after another."""

    def __init__(self, build: Builder, config: EncoderConfig) -> None:
        self._layers = [_Layer(build, config, f"{config.prefix}.{i}") for i in range(config.layers)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """From [T, width] to [T, width]."""
        for layer in self._layers:
            x = layer(x)
        return x


class _Layer:
    def __init__(self, build: Builder, c: EncoderConfig, prefix: str) -> None:
        names = [f"{prefix}.{name}" for name in c.names]
        self._norms = [Norm(build, name, c.width, c.eps) for name in names[:2]]
        self._split = (c.heads, 3, c.width // c.heads) if c.by_head else (3, c.heads, c.width // c.heads)
        self._parts = 2 if c.by_head else 1
        self._qkv = Projection(build, names[2], 3 * c.width, c.width)
        self._attention = Attention(build, prefix, c.width, c.heads)
        self._o = Projection(build, names[3], c.width, c.width)
        self._up = Projection(build, names[4], c.inner, c.width)
        self._down = Projection(build, names[5], c.width, c.inner)
        self._activate = build.op("activate", prefix, inner=c.inner, activation=c.activation, dtype=build.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._qkv(self._norms[0](x)).unflatten(-1, self._split).unbind(self._parts)
        x = x + self._o(self._attention(q, k, v))
        return x + self._down(self._activate.at(len(x))(self._up(self._norms[1](x))))
