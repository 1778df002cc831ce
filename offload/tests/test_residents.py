"""Which experts are in slots: every expert of a step is computed once, and nothing is overwritten too early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener_offload.residents import Residents


def test_the_least_recently_used_expert_leaves_first() -> None:
    held = Residents(3)
    assert [wave.slots for wave in held.waves([7, 8, 9])] == [{7: 0, 8: 1, 9: 2}]
    (again,) = held.waves([7, 9, 7])
    assert again.slots == {7: 0, 9: 2} and not again.copied
    here, fetched = held.waves([5, 9])
    assert here.slots == {9: 2} and fetched.slots == {5: 1} and fetched.copied and fetched.beside
    assert sorted(held.experts) == [5, 7, 9] and (held.hits, held.misses) == (3, 4)


def test_a_step_with_more_experts_than_slots_fills_one_half_while_the_other_is_computed_with() -> None:
    held = Residents(4)
    waves = held.waves(range(7))
    assert [sorted(wave.slots) for wave in waves] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all(wave.copied and wave.beside for wave in waves)
    one_slot = Residents(1).waves([4, 2])
    assert [wave.slots for wave in one_slot] == [{2: 0}, {4: 0}] and not one_slot[1].beside


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=10), min_size=1, max_size=8))
def test_waves_compute_each_expert_once_in_a_slot_that_holds_it(count: int, steps: list[list[int]]) -> None:
    held, slots = Residents(count), dict[int, int]()
    for needed in steps:
        waves = held.waves(needed)
        assert sorted(expert for wave in waves for expert in wave.slots) == sorted(set(needed))
        before: set[int] = set()
        for wave in waves:
            used = set(wave.slots.values())
            assert len(used) == len(wave.slots) and used <= set(range(count))
            if wave.copied:
                assert not wave.beside or not used & before
                slots.update({slot: expert for expert, slot in wave.slots.items()})
            assert all(slots[slot] == expert for expert, slot in wave.slots.items())
            before = used
        assert all(held.experts[slot] == expert for slot, expert in slots.items())
