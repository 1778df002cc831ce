"""How many slabs of the pool one request's state fills.

The worker plans its memory with this number and the scheduler refuses requests by it, so both count here. A request
that fits the plan must never be refused, and one that was accepted must fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from evener.contracts.state import StateKind, StateSpec
from evener.errors import UnknownNameError


def find_kinds(specs: Sequence[StateSpec], kinds: Mapping[str, StateKind]) -> tuple[StateKind, ...]:
    """The kind of each spec.

    Raises:
        UnknownNameError: no package registers the kind of one of them.
    """
    if missing := [spec.kind for spec in specs if spec.kind not in kinds]:
        raise UnknownNameError("state kind", missing[0], kinds, "Install the package that registers it.")
    return tuple(kinds[spec.kind] for spec in specs)


def slabs_needed(
    specs: Sequence[StateSpec], kinds: Sequence[StateKind], cuts: Sequence[int], block_size: int, tokens: int,
    step_tokens: int,
) -> int:  # fmt: skip
    """Slabs that one request of ``tokens`` tokens holds at most, when a step adds at most ``step_tokens`` of them.

    Args:
        specs, kinds, cuts: of each state group: its spec, the kind of that, and its blocks in a slab.
        block_size: tokens of a block.
    """
    # Blocks of groups with equal cuts fill slabs together.
    held = Counter[int]()
    for (spec, kind, cut), groups in Counter(zip(specs, kinds, cuts, strict=True)).items():
        # The number goes up and down as tokens are added: a window of w tokens touches one block more at some ends than
        # at others, and a step may pass one snapshot more. So all ends within the last block or snapshot are looked at.
        ends = range(max(1, tokens - (spec.every or block_size) + 1), tokens + 1)
        held[cut] += groups * max(_live_blocks(kind, spec, end, step_tokens, block_size) for end in ends)
    return sum(-(-count // cut) for cut, count in held.items())


def _live_blocks(kind: StateKind, spec: StateSpec, end: int, step_tokens: int, block_size: int) -> int:
    """Blocks of one group while a step of ``step_tokens`` tokens that ends at ``end`` is in flight."""
    first = kind.first_live_block(spec, max(0, end - step_tokens), block_size)
    return kind.live_blocks(spec, first, -(-end // block_size), block_size)
