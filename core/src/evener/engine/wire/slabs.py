"""How many slabs of the pool one request's state fills.

The worker plans its memory with this number and the scheduler refuses requests by it, so both count here. A request
that fits the plan must never be refused, and one that was accepted must fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

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


@lru_cache(4096)  # requests that come together often have the same length
def slabs_needed(
    specs: tuple[StateSpec, ...], kinds: tuple[StateKind, ...], cuts: tuple[int, ...], block_size: int, tokens: int,
    step_tokens: int,
) -> int:  # fmt: skip
    """Slabs that one request of ``tokens`` tokens holds at most, when a step adds at most ``step_tokens`` of them.

    Args:
        specs, kinds, cuts: for each state group its spec, its kind, and how many of its blocks a slab holds.
        block_size: tokens of a block.
    """
    # Blocks of groups with equal cuts fill slabs together.
    held = Counter[int]()
    for (spec, kind, cut), groups in Counter(zip(specs, kinds, cuts, strict=True)).items():
        # The number goes up and down as tokens are added: a window of w tokens touches one more block at some ends than
        # at others, and a step may pass one more snapshot. So all ends within the last block or snapshot are tried.
        ends = range(max(1, tokens - (spec.every or block_size) + 1), tokens + 1)
        firsts = ((end, kind.first_live_block(spec, max(0, end - step_tokens), block_size)) for end in ends)
        held[cut] += groups * max(kind.live_blocks(spec, at, -(-end // block_size), block_size) for end, at in firsts)
    return sum(-(-count // cut) for cut, count in held.items())
