"""The same experts a second time in host memory, in the layout of another backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.contracts.declared import CallSite, StackedWeight
from evener.contracts.placement import Placement
from evener.contracts.quant import Packing
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.placed_layers import stacks

#: A layer's stack of gate and up projections, and its stack of down projections.
Stacks = tuple[StackedWeight, StackedWeight]


def second_layout(site: CallSite, first: Resolver, second: Resolver, where: str) -> Stacks:
    """Give the stacks of ``site`` the layout of ``first``, and return the stacks that ``second`` reads: new stacks, or
    the same ones where both read one layout. New stacks must still be declared (``keep``).

    Args:
        where: what the new stacks are for, as a part of their names.
    """
    own = stacks(site)
    others = [replace(stack, name=f"{stack.name} for {where}") for stack in own]
    first.packings(own)
    second.packings(others)
    gate_up, down = (
        mine if (mine.layout, mine.parts) == (other.layout, other.parts) else other
        for mine, other in zip(own, others, strict=True)
    )
    return gate_up, down


def kind_of(found: Stacks) -> tuple[Any, ...]:
    """A key that is equal for layers whose experts may use the same slots."""
    return tuple((s.layout, s.rows, s.columns, s.experts, tuple(part.format for part in s.parts)) for s in found)


def keep(site: CallSite, found: Stacks, own: Builder, placement: Placement) -> None:
    """Declare the new stacks in ``found``, so that they are loaded where ``placement`` says."""
    for stack in found:
        if not any(stack is each for each in stacks(site)):
            stack.placement = placement
            own.weights.append(stack)


def second_bytes(site: CallSite, found: Stacks, packings: Mapping[str, Packing]) -> int:
    """Bytes of the stacks in ``found`` that are not the site's own."""
    return sum(
        stack.experts * packings[stack.layout].nbytes(stack.parts, stack.dtype)
        for stack in found if not any(stack is each for each in stacks(site))
    )  # fmt: skip


def expert_bytes(found: Stacks, packings: Mapping[str, Packing]) -> int:
    """Bytes of one expert."""
    return sum(packings[stack.layout].nbytes(stack.parts, stack.dtype) for stack in found)
