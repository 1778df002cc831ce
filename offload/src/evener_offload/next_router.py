"""Guesses which experts a layer will need, while the layer before it is computed.

The residual stream changes little from one layer to the next. So a router, applied to the rows of the layer before its
own, mostly chooses the experts that it will choose in its own layer (Eliseev and Mazur 2023, "Fast Inference of
Mixture-of-Experts Language Models with Offloading"; Fang et al. 2025, "Fate"). Only copies depend on a guess, not
results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from evener.contracts.declared import CallSite, WeightGroup
from evener.contracts.ops import Bucket
from evener.contracts.statics import RouteStatic, select
from evener.layers.builder import Builder
from evener.ops.composites import linear_static
from evener.resolution.resolver import Resolver

if TYPE_CHECKING:
    import torch


class NextRouter:
    """The router of a ``moe_block``, applied to rows of the layer before it.

    Args:
        site: the ``moe_block``.
        own: has declared the router.

    Attributes:
        path: of the site.
    """

    def __init__(self, site: CallSite, own: Builder) -> None:
        self._site, self.path = site, site.path
        self._group: WeightGroup = next(g for g in own.groups if g.fields.get("router") is site.static["router"])

    def resolve(self, resolver: Resolver, bucket: Bucket) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function for one bucket: from rows [T, hidden] to expert ids, int32 [T, k], each token's best first."""
        static, path, group = self._site.static, f"{self._site.path} guessed", self._group
        score = resolver.resolve("linear", path, linear_static(static["router"]), bucket)
        route = resolver.resolve("route", path, select(static, RouteStatic), bucket)

        def guess(x: torch.Tensor) -> torch.Tensor:
            w = group.values
            ids: torch.Tensor = route(score(x, w.router, w.router_bias), w.correction)[0]
            return ids

        return guess


def likeliest(ids: np.ndarray[tuple[int, int], np.dtype[np.int32]], experts: int) -> list[int]:
    """The experts in ``ids`` [T, k], the likeliest first. A token's first choice has k points, its last choice 1 point.
    Of experts with equal points the lowest number is first."""
    tokens, top = ids.shape
    points = np.tile(np.arange(top, 0, -1), tokens)
    scores = np.bincount(ids.reshape(-1), weights=points, minlength=experts)
    return [int(expert) for expert in np.argsort(-scores, kind="stable")[: np.count_nonzero(scores)]]
