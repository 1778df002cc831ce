"""Which tokens have state of what drafts, as plans tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from evener_drafts.computed import ComputedTokens

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.connector import BlockMove, BlockMoves, BlockTransfer
from evener.contracts.state import StateSpec
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, BlockCopy, Plan, TableUpdate

FULL, WINDOW = StateSpec("full", ()), StateSpec("window", (), window=6)


def computed(*specs: StateSpec, brought: bool = False) -> ComputedTokens:
    """Of a draft model with a group of each spec, behind one of the model's own. Blocks have 4 tokens."""
    groups = [SimpleNamespace(spec=spec) for spec in (FULL, *specs)]
    geometry = SimpleNamespace(block_size=4, groups=groups)
    a: Any = SimpleNamespace(
        geometry=geometry, kinds={kind.name: kind for kind in BUILTIN_KINDS}, config=SimpleNamespace(max_seq_len=99)
    )
    return ComputedTokens(a, range(1, len(groups)), brought)


def row(slot: int, start: int, count: int, **changes: Any) -> Plan:
    return Plan(id=1, slots=[slot], starts=[start], counts=[count], **changes)


def begins(slot: int, start: int, count: int, *blocks: list[int], **changes: Any) -> Plan:
    """A request begins with these blocks of the draft model's groups."""
    update = TableUpdate(slot, 0, [[99] * len(blocks[0]), *blocks])
    return row(slot, start, count, admissions=[Admission(slot, [], Sampling())], updates=[update], **changes)


def test_a_text_has_the_state_of_what_was_computed_and_wrong_drafts_are_taken_back() -> None:
    found = computed(FULL)
    found.apply(begins(0, 0, 6, [1, 2]))
    assert found.length(0) == 0
    found.extend(0, 6)
    found.apply(row(0, 6, 5, updates=[TableUpdate(0, 2, [[99], [3]])]))
    found.extend(0, 11)
    assert found.length(0) == 11
    found.apply(row(0, 7, 1))
    assert found.length(0) == 7
    found.apply(row(0, 8, 1))
    assert found.length(0) == 7, "the model went on alone"
    # Its first block has all, its second one lacks the last token; the third holds nothing that counts.
    found.apply(begins(1, 8, 1, [1, 2, 3]))
    assert found.length(1) == 7


def test_a_fork_has_what_its_parent_had_and_a_fresh_block_nothing() -> None:
    found = computed(FULL)
    found.apply(begins(0, 0, 7, [1, 2]))
    found.extend(0, 7)
    found.apply(begins(1, 6, 3, [1, 5, 6], copies=[BlockCopy(1, 2, 5), BlockCopy(0, 2, 6)]))
    assert found.length(1) == 6 and found.length(0) == 7
    found.apply(begins(2, 4, 3, [1, 2]))  # block 2 was given out again
    assert found.length(2) == 4


@pytest.mark.parametrize(("brought", "length"), [(True, 8), (False, 4)])
def test_blocks_that_a_connector_brings_back_have_what_they_had(brought: bool, length: int) -> None:
    found = computed(FULL, brought=brought)
    found.apply(begins(0, 0, 6, [1, 2]))
    found.extend(0, 6)
    found.apply(row(0, 6, 1, moves=BlockMoves(out=[BlockMove(1, 1, 70), BlockMove(1, 2, 71)])))
    back = BlockTransfer(1, [BlockMove(1, 8, 70), BlockMove(1, 9, 71)])
    found.apply(begins(1, 8, 1, [8, 9, 3], moves=BlockMoves(back=[back])))
    assert found.length(1) == 6
    unseen = BlockTransfer(2, [BlockMove(1, 11, 70), BlockMove(1, 12, 5)])
    found.apply(begins(2, 8, 1, [11, 12, 13], moves=BlockMoves(back=[unseen])))
    assert found.length(2) == length


def test_what_a_window_no_longer_keeps_cannot_be_computed_later() -> None:
    assert not computed(FULL).drops
    found = computed(FULL, WINDOW)
    assert found.drops
    found.apply(begins(0, 0, 3, [1, 2, 3, 4], [11, 12, 13, 14]))
    found.extend(0, 3)
    # Token 3 reads from position 0 on; so does token 8, from 3 on, but token 9 nothing before position 4.
    assert found.reaches(0, 8) and not found.reaches(0, 9)
    # Of a prefix, the null block of the window's group is as good as one with the state.
    found.extend(0, 12)
    found.apply(begins(1, 12, 1, [1, 2, 3, 5], [0, 12, 13, 15]))
    assert found.length(1) == 12 and found.reaches(1, 12)


def test_a_block_without_the_state_in_one_group_lacks_it_in_all() -> None:
    found = computed(FULL, WINDOW)
    found.apply(begins(0, 0, 8, [1, 2], [11, 12]))
    found.extend(0, 8)
    found.apply(begins(1, 0, 8, [3, 4], [13, 14]))
    found.apply(begins(2, 8, 1, [1, 2, 5], [11, 14, 15]))
    assert found.length(2) == 4 and found.reaches(2, 8)
