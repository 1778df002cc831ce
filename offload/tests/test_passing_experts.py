"""Experts of several layers in the same slots, and what is copied ahead for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener_offload.passing_experts import PassingExperts
from evener_offload.prefetch import Place, Prefetch
from evener_offload.residents import Wave


def test_an_expert_that_was_copied_ahead_stays_until_its_layer_is_reached() -> None:
    held = PassingExperts(6, experts=10)
    assert held.further([20, 21], 8).slots == {20: 0, 21: 1}
    for layer in (0, 1):
        (wave,) = held.waves([10 * layer + expert for expert in range(4)], together=True)
        assert sorted(wave.slots.values()) == [2, 3, 4, 5], "those of the layer before leave, not those of layer 2"
    (wave,) = held.waves([20, 21, 22], together=True)
    assert wave.slots[20] == 0 and wave.slots[21] == 1 and wave.copied == (22,)
    assert (held.guesses, held.right, held.wasted) == (2, 2, 0)


def test_a_wrong_guess_leaves_first() -> None:
    held = PassingExperts(4, experts=10)
    held.waves([0, 1])
    held.further([10, 11], 8)
    (wave,) = held.waves([11, 12], together=True)
    assert wave.slots == {11: 3, 12: 2} and (held.right, held.wasted) == (1, 1)


def test_what_is_there_of_a_later_layer_is_not_copied_again() -> None:
    held = PassingExperts(4, experts=10)
    held.waves([10, 11])
    assert held.further([10, 12], 8).slots == {12: 2}
    held.waves([0, 1])
    assert 10 in held.slots and 12 in held.slots and 11 not in held.slots
    held.further([12, 13], 8)
    assert {10, 12, 13} < {*held.slots} and not held.further([20, 21], 8).slots.keys() - {20}, "one may leave"


def test_later_layers_lose_their_experts_where_one_layer_needs_all_slots() -> None:
    held = PassingExperts(4, experts=10)
    held.further([10, 11, 12, 13], 8)
    (wave,) = held.waves([0, 1, 2, 3], together=True)
    assert len(wave.slots) == 4
    (wave,) = held.waves([10], together=True)
    assert wave.copied == (10,)


@given(st.integers(1, 7), st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sets(st.integers(0, 7), min_size=1))))
def test_every_needed_expert_is_computed_once_from_a_slot_of_its_own(count: int, calls: Any) -> None:
    held = PassingExperts(count, experts=8)
    in_slot: dict[int, int] = {}

    def copy(wave: Wave) -> None:
        for expert in wave.copied:
            in_slot[wave.slots[expert]] = expert

    for ahead, layer, some in calls:
        experts = sorted(8 * layer + expert for expert in some)
        if ahead:
            wave = held.further(experts, 4)
            assert len({*wave.slots.values()}) == len(wave.slots) <= 4
            copy(wave)
            continue
        computed = list[int]()
        for wave in held.waves(experts, together=True):
            copy(wave)
            assert all(in_slot[slot] == expert for expert, slot in wave.slots.items())
            computed += wave.slots
        assert sorted(computed) == experts


class Slots:
    """Slots that note what is copied."""

    def __init__(self) -> None:
        self.experts, self.nbytes, self.copied = 10, 100, list[list[int]]()

    def copy_ahead(self, wave: Wave) -> None:
        self.copied.append(sorted(wave.slots))


def share_of(copy: float, of_host: tuple[int, ...] = ()) -> Any:
    """The host takes these experts, and a copy takes so many seconds."""
    return SimpleNamespace(
        measured=True, active=True, copying=lambda nbytes: copy,
        choose=lambda nbytes, some, rows: np.array([e for e in some if e in of_host], dtype=np.int64),
    )  # fmt: skip


def rows_of(**rows: int) -> Any:
    found = np.zeros(10, np.int64)
    for name, count in rows.items():
        found[int(name[1:])] = count
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("evener_offload.prefetch.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def layers(share: Any, count: int = 8) -> tuple[Prefetch, Slots, PassingExperts]:
    slots, held = Slots(), PassingExperts(count, 10)
    places = {f"layer {number}": Place(slots, held, number) for number in range(2)}  # type: ignore[arg-type]
    return Prefetch(places, share), slots, held


def step(prefetch: Prefetch, clock: list[float], lead: float, *rows: Any, tokens: int = 16) -> None:
    prefetch.begin(tokens)
    clock[0] += lead
    for number, each in enumerate(rows):
        prefetch.note_routing(f"layer {number}", tokens, each)


def test_experts_of_the_last_steps_routing_are_copied_while_nothing_else_is(clock: list[float]) -> None:
    prefetch, slots, _ = layers(share_of(1.0, of_host=(3,)))
    first, second = rows_of(e1=9, e2=5, e3=4, e4=1), rows_of(e0=7, e5=6)
    step(prefetch, clock, 4.5, first, second)
    assert slots.copied == [], "nothing is known before the first step"
    step(prefetch, clock, 4.5, first, second)
    assert slots.copied == [[1, 2], [10, 15]], "not the host's, nor one with a single row; layer after layer"
    assert prefetch.under_way == 0.0
    prefetch.note_copies(100, 2)
    assert prefetch.under_way == 2.0


def test_no_more_is_copied_than_ends_before_the_first_routing(clock: list[float]) -> None:
    prefetch, slots, _ = layers(share_of(1.0))
    rows = rows_of(e1=2, e2=9, e3=5)
    step(prefetch, clock, 2.5, rows, rows)
    step(prefetch, clock, 1.0, rows, rows)
    assert slots.copied == [[2, 3]], "those with the most rows"
    step(prefetch, clock, 9.0, rows, rows)
    assert slots.copied[1:] == [[1]], "time for one: the fastest beginning counts, as copies make it slower"
    step(prefetch, clock, 2.5, rows, rows, tokens=32)
    assert len(slots.copied) == 2, "how long steps of this size take is not known"


def test_a_smaller_step_gets_only_the_experts_that_it_will_probably_choose(clock: list[float]) -> None:
    prefetch, slots, _ = layers(share_of(1.0))
    rows = rows_of(e1=7, e2=16)
    for _ in range(2):
        step(prefetch, clock, 9.0, rows, rows, tokens=31)
    step(prefetch, clock, 9.0, rows, rows, tokens=16)
    assert slots.copied[-1] == [] and slots.copied[0] == [1, 2]
    prefetch, slots, _ = layers(None)
    step(prefetch, clock, 9.0, rows, rows, tokens=31)
    step(prefetch, clock, 9.0, rows, rows, tokens=16)
    assert slots.copied == [[1, 2], [11, 12]], "without measured costs, as much as the slots hold"


def test_after_wrong_guesses_the_next_steps_copy_nothing_ahead(clock: list[float]) -> None:
    prefetch, slots, held = layers(share_of(1.0))
    one, other = rows_of(e1=9, e2=5), rows_of(e3=9, e4=5)
    guessed = []
    for rows in (one, other, one, other, one, one, one, one):
        before = len(slots.copied)
        step(prefetch, clock, 4.5, rows, rows)
        guessed.append(len(slots.copied) > before)
        for number in range(2):  # the layers' own experts leave no copy in the slots
            held.waves(list(range(10 * number + 5, 10 * number + 10)))
    assert guessed == [False, True, False, True, False, False, True, True], "one step rests, then two"


def test_rows_of_absent_experts_are_those_of_one_layer() -> None:
    _, _, held = layers(None)
    held.waves([3, 11, 12])
    place = Place(Slots(), held, 1)  # type: ignore[arg-type]
    assert place.absent(rows_of(e1=4, e2=5, e3=6)).tolist() == rows_of(e3=6).tolist()
