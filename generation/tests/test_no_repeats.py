"""Sequences of tokens that do not come again: the tokens that are left are those that transformers leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from evener_constraints.no_repeats import NoRepeats, PromptSequences
from transformers import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from evener.contracts.grammar.library import Matcher
from evener_generation.forbidden_tokens import ForbiddenTokens

VOCABULARY = 70


def matcher(prompt: Sequence[int], size: int, prompt_size: int = 0) -> Matcher:
    return NoRepeats(PromptSequences((size, prompt_size), prompt), ForbiddenTokens((), VOCABULARY))


def left(found: Matcher) -> list[int]:
    """The ids that may come."""
    bits = np.unpackbits(np.frombuffer(found.mask(), dtype=np.uint8), bitorder="little")
    return [int(each) for each in np.flatnonzero(bits)]


def oracle(prompt: list[int], text: list[int], size: int, prompt_size: int) -> list[int]:
    """What transformers leaves."""
    ids, scores = torch.tensor([prompt + text]), torch.zeros(1, VOCABULARY)
    if size:
        scores = NoRepeatNGramLogitsProcessor(size)(ids, scores)
    if prompt_size:
        scores = EncoderNoRepeatNGramLogitsProcessor(prompt_size, torch.tensor([prompt]))(ids, scores)
    return [int(each) for each in torch.isfinite(scores[0]).nonzero()]


@pytest.mark.parametrize("sizes", [(1, 0), (2, 0), (3, 0), (5, 0), (0, 1), (0, 2), (0, 3), (3, 2), (2, 4)])
def test_the_tokens_that_are_left_are_those_of_transformers(sizes: tuple[int, int]) -> None:
    draw = random.Random(sum(sizes))
    for _ in range(12):
        few = range(draw.randint(2, 5))
        prompt = [draw.choice(few) for _ in range(draw.randint(1, 30))]
        found, text = matcher(prompt, *sizes), list[int]()
        for _ in range(25):
            wanted = oracle(prompt, text, *sizes)
            assert left(found) == wanted, (prompt, text)
            text.append(draw.choice([each for each in wanted if each in few] or wanted))
            copied = found.copy()
            found.accept(text[-1])
            copied.accept(VOCABULARY - 1)


def test_tokens_that_came_before_the_first_mask_count_as_after_a_preemption() -> None:
    found = matcher([1, 2], 2)
    for token in (3, 1):
        found.accept(token)
    assert left(found) == [each for each in range(VOCABULARY) if each != 2]


def test_a_prompt_shorter_than_the_sequences_forbids_nothing_yet() -> None:
    found = matcher([1, 1], 4, 4)
    assert left(found) == list(range(VOCABULARY))


def test_a_text_that_could_only_repeat_itself_says_so() -> None:
    found = matcher(range(VOCABULARY), 1)
    with pytest.raises(ValueError, match="would repeat a sequence"):
        found.mask()


def test_ids_beyond_the_vocabulary_such_as_places_of_media_are_passed_over() -> None:
    found = matcher([5, 10**6], 1)
    assert left(found) == [each for each in range(VOCABULARY) if each != 5]


def test_tokens_that_the_other_matcher_forbids_stay_forbidden() -> None:
    found = NoRepeats(PromptSequences((2, 0), [1, 2, 1]), ForbiddenTokens([(7,)], VOCABULARY))
    assert left(found) == [each for each in range(VOCABULARY) if each not in (2, 7)]


def test_samples_of_a_prompt_share_its_sequences_and_not_those_of_their_texts() -> None:
    prompt = PromptSequences((2, 0), [1, 2, 1])
    one, other = (NoRepeats(prompt, ForbiddenTokens((), VOCABULARY)) for _ in range(2))
    before = one.mask()
    for token in (3, 1, 3, 1):
        one.accept(token)
    assert one.mask() != before == other.mask()
