"""Stop strings across pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener.frontend.stops import StopStrings


def run(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each piece, with the rest at the end, and the stop string."""
    watch = StopStrings(stops, include)
    shown = []
    for piece in pieces:
        match = watch.push(piece)
        shown.append(match.text)
        if match.stop is not None:
            return shown, match.stop
    return [*shown, watch.finish()], None


def reference(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character, from the whole text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3).map(tuple),
    pieces=st.lists(st.text("ab.", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_stop_matching_is_independent_of_chunking(stops: tuple[str, ...], pieces: list[str], include: bool) -> None:
    shown, stop = run(stops, pieces, include)
    assert ("".join(shown), stop) == reference(stops, "".join(pieces), include)


def test_a_stop_string_over_three_pieces_is_never_shown() -> None:
    assert run(("END",), ["xE", "N", "D tail"]) == (["x", "", ""], "END")


def test_partial_stop_match_is_released_when_it_fails() -> None:
    assert run(("END",), ["E", "N", "x"]) == (["", "", "ENx", ""], None)


def test_held_back_text_is_flushed_at_finish() -> None:
    assert run(("END",), ["a", "EN"]) == (["a", "", "EN"], None)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    assert run(("\n\nUser:",), ["one\n", "two\n\nU"]) == (["one", "\ntwo", "\n\nU"], None)


def test_longer_stop_string_wins_when_two_end_together() -> None:
    assert run(("c", "abc"), ["xab", "c"]) == (["x", ""], "abc")


def test_the_stop_string_stays_if_asked_for() -> None:
    assert run(("END",), ["xEN", "Dy"], include=True) == (["x", "END"], "END")


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert run((), ["a", "b"]) == (["a", "b", ""], None)
