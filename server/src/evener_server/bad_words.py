"""``bad_words`` of vLLM's API: texts that must not be generated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from pydantic import Field

from evener.contracts.grammar.library import GrammarSpec
from evener.errors import RequestError
from evener.frontend.tokenizer import Tokenizer
from evener.sampling_params import MAX_LOGIT_BIAS, SamplingParams

#: Of one request, characters of each, and tokens of all at both places where a word may begin.
MAX_WORDS, MAX_CHARACTERS, MAX_TOKENS = 128, 128, 2048

BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]], Field(max_length=MAX_WORDS, fail_fast=True)
]


def without_words(params: SamplingParams, words: Sequence[str], tokenizer: Tokenizer | None) -> SamplingParams:
    """``params`` with which none of ``words`` is generated.

    Words of one token are biases of minus infinity. Others need masks, as a grammar does. With a grammar, all words
    become masks: biases might leave it without any token that can be sampled.

    Raises:
        RequestError: the model has no tokenizer, a word is only spaces, or another parameter cannot be combined with
            masks.
    """
    sequences = _sequences(words, tokenizer)
    ids = {each[0]: -math.inf for each in sequences if len(each) == 1}
    biases = {**params.logit_bias, **ids}
    if params.grammar is None and len(ids) == len(sequences) and len(biases) <= MAX_LOGIT_BIAS:
        return replace(params, logit_bias=biases)
    if params.min_tokens:
        message = "min_tokens cannot be used with bad_words that have several tokens; leave it out"
        raise RequestError(message, "min_tokens")
    grammar = params.grammar or GrammarSpec(kind="any", text="")
    return replace(params, grammar=msgspec.structs.replace(grammar, forbidden=sequences))


def _sequences(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and after a space."""
    if tokenizer is None:
        raise RequestError("bad_words needs a tokenizer, which this model's folder does not have", "bad_words")
    found: dict[tuple[int, ...], None] = {}
    count = 0
    for place, word in enumerate(words):
        if not (bare := word.lstrip()):
            raise RequestError(f"bad_words[{place}] is only spaces; leave it out", "bad_words")
        both = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
        found |= dict.fromkeys(ids for ids in both if ids)
        if (count := count + sum(map(len, both))) > MAX_TOKENS:
            message = f"bad_words have more than {MAX_TOKENS} tokens in all, with and without a space before each"
            raise RequestError(f"{message}; send fewer or shorter ones", "bad_words")
    # A sequence with a token that is forbidden alone cannot come anyway.
    alone = {ids[0] for ids in found if len(ids) == 1}
    return tuple(ids for ids in found if len(ids) == 1 or alone.isdisjoint(ids))
