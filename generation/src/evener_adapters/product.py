"""The product of a linear weight with places for adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from evener.contracts.adapters import AdaptedProduct
from evener.contracts.declared import Table
from evener.contracts.ops import OpFunction, Static, Use
from evener.ops.composites import linear_static

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight


@dataclass(eq=False)
class AdapterRows:
    """Which rows of the step that is being computed have which adapter: ``index`` int32 [T], an index into the stacks,
    -1 for a row without one. None: no row of the step has one."""

    index: torch.Tensor | None = None


@dataclass(eq=False)
class AdapterStack(AdaptedProduct):
    """Places for the adapters of one linear weight, each of one of its parts or of several.

    Attributes:
        down: tensor [slots, parts * rank, columns]; unused rows are zero.
        up: tensor [slots, rows, rank], with the adapters' scales; unused columns are zero. The rows of part p take the
            p-th ``rank`` products of ``down``.
        slots, rank: how many adapters, and the largest rank of one.
        rows: of the step; the same object for all weights.
    """

    down: Table
    up: Table
    slots: int
    rank: int
    rows: AdapterRows

    def linear(self, static: Static, use: Use) -> OpFunction:
        """``linear``, then ``add_adapters`` in steps in which a row has an adapter."""
        weight = static["weight"]
        own = linear_static(replace(weight, adapters=None))
        project, parts = use("linear", **own), tuple(part.rows for part in weight.parts)
        shared = {name: own[name] for name in ("rows", "columns", "dtype")}
        add = use("add_adapters", **shared, slots=self.slots, rank=self.rank, inner=len(parts) * self.rank, parts=parts)

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            y: torch.Tensor = project(x, weight, bias)
            if self.rows.index is None:
                return y
            return add(y, x, self.down.value, self.up.value, self.rows.index)  # type: ignore[no-any-return]

        return run
