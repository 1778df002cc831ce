"""The last layer for the rows that a step samples from: its attention reads and writes the state of all tokens, its MLP
or experts compute the sampled rows only. In a prompt that is nearly all of these products: 2 % of a model of 36 layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from evener.contracts.architecture import Architecture
from evener.contracts.declared import CallSite
from evener.contracts.ops import OpFunction
from evener.layers.causal_lm import CausalLM
from evener.layers.decoder import DecoderLayer, MixerLayer
from evener.resolution.buckets import bucket_index
from evener.resolution.resolver import Resolver

Pair = tuple[torch.Tensor, torch.Tensor]


class LastRows:
    """Takes the place of what a model calls last, once that is resolved.

    A layer that one op computes is divided into its halves where kernels serve both. Where they do not, the model
    returns all rows, which is always right.

    Attributes:
        rows: int32 [S], the rows that the model computes and returns now; None: all.
    """

    rows: torch.Tensor | None = None

    def __init__(self, model: Architecture, resolver: Resolver) -> None:
        if (site := last_call(model)) is None:
            return
        if site.op != "decoder_layer":
            site.table = tuple(partial(self._second, whole, site.table) for whole in site.table)
        elif not site.static["parallel"] and (halves := _halves(site, resolver)) is not None:
            both = zip(site.table, halves[0], strict=True)
            site.table = tuple(partial(self._layer, whole, first, halves[1]) for whole, first in both)

    @contextmanager
    def only(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Within the block the model computes ``rows`` only."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def _second(
        self, whole: OpFunction, few: Sequence[OpFunction], x: torch.Tensor, residual: torch.Tensor, weights: Any
    ) -> Pair:
        """The second half of a layer: ``whole`` for all rows, for fewer the entry of their bucket in ``few``."""
        if self.rows is None:
            return whole(x, residual, weights)  # type: ignore[no-any-return]
        x, residual = (each.index_select(0, self.rows) for each in (x, residual))
        return few[bucket_index(len(x))](x, residual, weights) if len(x) else (x, residual)

    def _layer(
        self, whole: OpFunction, first: OpFunction, few: Sequence[OpFunction], x: torch.Tensor,
        residual: torch.Tensor | None, positions: torch.Tensor, attention: Any, mlp: Any, views: Any, meta: Any,
    ) -> Pair:  # fmt: skip
        """A whole layer, or its halves if fewer rows are wanted."""
        if self.rows is None:
            return whole(x, residual, positions, attention, mlp, views, meta)  # type: ignore[no-any-return]
        x, stream = first(x, residual, positions, attention, views, meta)
        return self._second(whole, few, x, stream, mlp)


def last_call(model: Architecture) -> CallSite | None:
    """The call whose result is the stream that a model's head reads, each row from its own row of what the call is
    given; None of a model that is no plain stack of layers, and on pipeline stages before the last."""
    layers = model.stack.layers if isinstance(model, CausalLM) and model.head is not None else ()
    return layers[-1].sites[-1] if layers and type(layers[-1]) in (DecoderLayer, MixerLayer) else None


def _halves(site: CallSite, resolver: Resolver) -> tuple[Sequence[OpFunction], Sequence[OpFunction]] | None:
    """The kernels of both halves for each bucket: the second for as many rows as a step samples. None, with nothing
    noted, if the reference would compute a part that it does not compute in the whole layer."""
    manifest, static = resolver.manifest, site.static
    known, lacking = list(manifest.choices), set(manifest.fallback_lines())

    buckets, path = resolver.available.buckets, site.path
    first = [resolver.resolve("attention_block", path, static["attention"], b) for b in buckets]
    sampled = [b for b in buckets if b.low <= resolver.available.sizes.outputs]
    second = [resolver.resolve("mlp_block", path, static["mlp"], b) for b in sampled]
    served = set(manifest.fallback_lines()) == lacking
    # Where the layer itself is made of its halves, they are noted already.
    new = set(manifest.choices[len(known) :]) - set(known)
    manifest.choices = [*known, *(choice for choice in manifest.choices[len(known) :] if choice in new and served)]
    return (first, second) if served else None
