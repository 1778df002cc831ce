"""Which experts are in slots: every expert of a step is computed once, and nothing is overwritten too early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evener_offload.next_router import likeliest
from evener_offload.residents import Residents, Wave


def slots(waves: Sequence[Wave]) -> list[Mapping[int, int]]:
    return [wave.slots for wave in waves]


def test_the_least_recently_used_expert_leaves_first() -> None:
    held = Residents(3)
    assert slots(held.waves([7, 8, 9])) == [{7: 0, 8: 1, 9: 2}]
    (again,) = held.waves([7, 9, 7])
    assert again.slots == {7: 0, 9: 2} and not again.copied
    here, fetched = held.waves([5, 9])
    assert here.slots == {9: 2} and fetched.slots == {5: 1} and fetched.copied
    assert sorted(held.slots) == [5, 7, 9] and (held.hits, held.misses, held.copied) == (3, 4, 4)


def test_a_step_with_more_experts_than_slots_fills_one_half_while_the_other_is_computed_with() -> None:
    held = Residents(4)
    waves = held.waves(range(7))
    assert [sorted(wave.slots) for wave in waves] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all(wave.copied for wave in waves)
    # The experts that are here are divided too, so that the first copies need not wait for all of them.
    assert [sorted(wave.slots) for wave in held.waves(range(7))] == [[3, 4], [5, 6], [0, 1], [2]]
    one_slot = Residents(1).waves([4, 2])
    assert slots(one_slot) == [{2: 0}, {4: 0}]


def test_experts_that_are_under_way_are_computed_after_those_that_are_here() -> None:
    held = Residents(8)
    held.waves([1, 2, 3])
    waves = held.waves([1, 2, 3, 4], late={2})
    assert [(sorted(wave.slots), wave.copied) for wave in waves] == [([1, 3], ()), ([2], ()), ([4], (4,))]


def test_a_step_that_is_computed_at_once_copies_what_is_missing_over_what_it_does_not_need() -> None:
    held = Residents(4)
    held.waves([0, 1, 2, 3])
    (wave,) = held.waves([3, 9, 0, 8], late={0}, together=True)
    assert wave.slots == {0: 0, 3: 3, 8: 1, 9: 2} and wave.copied == (8, 9)
    (wave,) = held.waves([3, 9, 7], elsewhere={7}, together=True)
    assert wave.slots == {3: 3, 9: 2} and not wave.copied
    assert len(held.waves(range(5), together=True)) > 1, "there are not slots for all"


def test_a_guess_takes_the_slots_of_the_oldest_but_never_of_a_guessed_expert() -> None:
    held = Residents(4)
    held.waves([0, 1, 2, 3])
    wave = held.ahead([9, 0, 1, 8, 7])
    assert wave.slots == {9: 2, 8: 3} and wave.copied
    assert sorted(held.slots) == [0, 1, 8, 9]
    (here, missing) = held.waves([0, 9, 5])
    # 8 was a wrong guess, so it leaves before the older 1.
    assert sorted(here.slots) == [0, 9] and missing.slots == {5: 3}
    assert (held.guesses, held.right, held.wasted, held.copied) == (5, 2, 1, 7)
    assert (held.hits, held.misses) == (2, 5)


def test_a_guess_fills_at_most_half_of_the_slots_and_one_of_a_single_one() -> None:
    held = Residents(5)
    assert list(held.ahead([6, 5, 4, 3]).slots) == [6, 5]
    assert Residents(1).ahead([6, 5]).slots == {6: 0}
    held = Residents(2)
    held.waves([1, 2])
    assert held.ahead([1, 2, 3]).slots == {}, "all experts that are here were guessed"


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=10), st.lists(st.integers(0, 9), unique=True),
            st.sets(st.integers(0, 9)), st.booleans(),
        ),
        min_size=1, max_size=8,
    ),
)  # fmt: skip
def test_waves_compute_each_expert_once_in_a_slot_that_holds_it(
    count: int, steps: list[tuple[list[int], list[int], set[int], bool]]
) -> None:
    held, holds = Residents(count), dict[int, int]()
    for needed, guessed, late, together in steps:
        waves = held.waves(needed, late, together=together)
        assert sorted(expert for wave in waves for expert in wave.slots) == sorted(set(needed))
        before: set[int] = set()
        for wave in waves:
            used = set(wave.slots.values())
            assert used and len(used) == len(wave.slots) and used <= set(range(count))
            if wave.copied:
                assert not used & before or count == 1
                holds.update({wave.slots[expert]: expert for expert in wave.copied})
            assert all(holds[slot] == expert for expert, slot in wave.slots.items())
            before = used
        guess = held.ahead(guessed).slots
        assert not {holds.get(slot) for slot in guess.values()} & set(guessed)
        holds.update({slot: expert for expert, slot in guess.items()})
        assert {slot: expert for expert, slot in held.slots.items()} == holds


def test_the_likeliest_expert_is_what_most_tokens_would_choose_first() -> None:
    assert likeliest(np.array([[5, 2], [2, 7], [5, 0]], dtype=np.int32), 9) == [5, 2, 0, 7]
