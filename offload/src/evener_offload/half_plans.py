"""A step's rows, divided into two halves."""

from __future__ import annotations

from itertools import accumulate

from evener.engine.wire.plan import DraftedTokens, Plan

#: The smaller half has at least this share of a step's tokens.
_LEAST_SHARE = 0.25


def half_plans(plan: Plan, block_size: int) -> tuple[Plan, Plan] | None:
    """The requests of ``plan`` as two plans with about equally many tokens. The plans have slots, starts, counts and
    drafts, nothing else. The first plan has the first tokens. A request may be divided where a block of state ends,
    as chunks of prompts are. None: there is no place to divide at, or there are adapters, which are selected for a
    whole step.

    The first half must write a layer's state before the second half reads it.
    """
    cut = None if plan.adapted else _place(plan, block_size)
    if cut is None:
        return None
    first = Plan(id=plan.id)
    second = Plan(id=plan.id)
    drafts = {draft.row: draft for draft in plan.drafts}
    left = cut
    for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
        here = min(left, count)
        left -= here
        for half, begin, some in ((first, start, here), (second, start + here, count - here)):
            if some:
                half.slots.append(slot)
                half.starts.append(begin)
                half.counts.append(some)
                if row in drafts:
                    half.drafts.append(DraftedTokens(len(half.slots) - 1, drafts[row].ids))
    return first, second


def _place(plan: Plan, block_size: int) -> int | None:
    """The number of tokens in the first half."""
    total = sum(plan.counts)
    places = list(accumulate(plan.counts))[:-1]
    drafted = {draft.row for draft in plan.drafts}
    begin = 0
    for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        if row not in drafted and begin < total / 2 < begin + count:
            # Ends of blocks just before and just after the middle of the step.
            middle = start + total // 2 - begin
            ends = (middle // block_size * block_size, -(-middle // block_size) * block_size)
            places += [begin + end - start for end in ends if start < end < start + count]
        begin += count
    cut = min(places, key=lambda place: abs(2 * place - total), default=0)
    return cut if min(cut, total - cut) >= _LEAST_SHARE * total else None
