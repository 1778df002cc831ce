"""A guess of which experts a layer will need, made while the layer before is computed.

The residual stream changes little from one layer to the next, so a layer's router mostly chooses the same experts for
the rows that the router before it got (Eliseev and Mazur 2023, "Fast Inference of Mixture-of-Experts Language Models
with Offloading"; Fang et al. 2025, "Fate"). Nothing but copies depends on a guess.
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
    """The router of ``site``, a ``moe_block``, for rows of the layer before; ``own`` has declared it. ``path``: of the
    site."""

    def __init__(self, site: CallSite, own: Builder) -> None:
        self._site, self.path = site, site.path
        self._group: WeightGroup = next(g for g in own.groups if g.fields.get("router") is site.static["router"])

    def resolve(self, resolver: Resolver, bucket: Bucket) -> Callable[[torch.Tensor], torch.Tensor]:
        """The callable at one bucket: rows [T, hidden] to ids of experts, int [T, k], each token's best one first."""
        static, path, group = self._site.static, f"{self._site.path} guessed", self._group
        score = resolver.resolve("linear", path, linear_static(static["router"]), bucket)
        route = resolver.resolve("route", path, select(static, RouteStatic), bucket)

        def guess(x: torch.Tensor) -> torch.Tensor:
            w = group.values
            ids: torch.Tensor = route(score(x, w.router, w.router_bias), w.correction)[0]
            return ids

        return guess


def likeliest(ids: np.ndarray[tuple[int, int], np.dtype[np.int32]], experts: int) -> list[int]:
    """The experts that occur in ``ids`` [T, k], best first. A token's first choice counts k times as much as its last
    one; of equal ones the lowest number is first."""
    tokens, top = ids.shape
    points = np.tile(np.arange(top, 0, -1), tokens)
    scores = np.bincount(ids.reshape(-1), weights=points, minlength=experts)
    return [int(expert) for expert in np.argsort(-scores, kind="stable")[: np.count_nonzero(scores)]]
