"""Drafts from earlier in the text."""

from __future__ import annotations

import random

from evener_generation.drafting.ngram_drafter import NgramDrafter


def propose(tokens: list[int], count: int = 4) -> list[int]:
    drafter = NgramDrafter()
    drafter.extend(tokens)
    return list(drafter.propose(count))


def test_the_tokens_that_followed_the_same_tokens_before_are_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]
    assert propose([1, 2, 3, 9, 9, 7, 2, 3]) == [9, 9, 7, 2]


def test_the_longest_match_decides_and_among_equal_ones_the_newest() -> None:
    assert propose([1, 2, 3, 10, 2, 3, 11, 1, 2, 3], 1) == [10]
    assert propose([2, 3, 10, 2, 3, 11, 5, 2, 3], 1) == [11]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert propose([1, 2, 3, 4]) == propose([]) == propose([1]) == []


def test_a_text_that_repeats_itself_is_continued_at_any_length() -> None:
    assert propose([7, 7, 7], 5) == [7] * 5
    assert propose([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_pieces_of_any_size_give_the_same_proposals() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(300)]
    drafter = NgramDrafter()
    for end in range(len(tokens)):
        drafter.extend(tokens[end : end + 1])
        assert list(drafter.propose(3)) == propose(tokens[: end + 1], 3)


def test_of_a_long_prompt_the_newest_tokens_are_known() -> None:
    assert propose([1, 2, 3, *range(10, 20_000), 1, 2]) == []
    assert propose([*range(10, 20_000), 1, 2, 3, 1, 2], 1) == [3]
