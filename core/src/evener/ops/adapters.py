"""The product of a linear weight that has adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from evener.contracts.ops import OpFunction, Static, Use
from evener.ops.composites import linear_static

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight


def adapted_linear(static: Static, use: Use) -> OpFunction:
    """``linear``, then ``add_adapters`` in steps in which a row has an adapter."""
    weight = static["weight"]
    own, stack = linear_static(replace(weight, adapters=None)), weight.adapters
    project, parts = use("linear", **own), tuple(part.rows for part in weight.parts)
    sizes = {"slots": stack.slots, "rank": stack.rank, "inner": len(parts) * stack.rank, "parts": parts}
    add = use("add_adapters", **sizes, **{name: own[name] for name in ("rows", "columns", "dtype")})

    def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = project(x, weight, bias)
        if stack.rows.index is None:
            return y
        return add(y, x, stack.down.value, stack.up.value, stack.rows.index)  # type: ignore[no-any-return]

    return run
