"""Words that must not be generated, over HTTP: what reaches the engine, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest

from evener.contracts.grammar.library import GrammarSpec
from evener.engine.wire.messages import LogitBias, NewRequest, Sampling
from evener.frontend.tokenizer import Tokenizer
from evener.sampling_params import SamplingParams
from evener_server.bad_words import without_words


def asked(api: Any) -> Sampling:
    sampling: Sampling = [message.sampling for message in api.engine.sent if isinstance(message, NewRequest)][-1]
    return sampling


class OfWords:
    """A tokenizer that knows one word, with and without a space before it; else a token for each byte."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        known = {"Rome": [300], " Rome": [301], "Oslo": [302, 303], " Oslo": [304]}
        return known.get(text) or list(text.encode())


def without(*words: str, params: SamplingParams | None = None) -> SamplingParams:
    return without_words(params or SamplingParams(), words, cast("Tokenizer", OfWords()))


def test_words_of_one_token_are_biases_for_a_beginning_and_after_a_space() -> None:
    found = without("Rome", "  Rome", "x", params=SamplingParams(logit_bias={5: 2.0, 300: 100.0}))
    assert found.grammar is None
    assert found.logit_bias == {5: 2.0, 300: -math.inf, 301: -math.inf, ord("x"): -math.inf}


def test_a_word_of_several_tokens_in_one_place_needs_masks_for_all_words() -> None:
    found = without("Oslo", "x")
    assert not found.logit_bias
    assert found.grammar == GrammarSpec(kind="any", text="", forbidden=((302, 303), (304,), (ord("x"),)))


def test_words_are_forbidden_within_a_grammar_too() -> None:
    held = SamplingParams(grammar=GrammarSpec(kind="regex", text="[a-z]+"))
    found = without("x", params=held)
    assert found.grammar == GrammarSpec(kind="regex", text="[a-z]+", forbidden=((ord("x"),),)) and not found.logit_bias


def test_more_words_than_biases_fit_are_forbidden_by_masks() -> None:
    found = without("x", params=SamplingParams(logit_bias=dict.fromkeys(range(200, 712), 1.0)))
    assert found.grammar is not None and found.grammar.forbidden == ((ord("x"),),) and len(found.logit_bias) == 512


def test_chats_and_completions_send_their_words_to_the_engine(api: Any) -> None:
    for send in (api.complete, api.chat):
        assert send(bad_words=["x"], min_tokens=1, ignore_eos=True).status_code == 200
        assert asked(api).bias[0] == LogitBias(ord("x"), -math.inf) and asked(api).grammar is None
        assert send(bad_words=["no"], guided_regex="[a-z]+").status_code == 200
        spec = asked(api).grammar
        assert spec is not None and (spec.kind, spec.forbidden) == ("regex", ((110, 111), (32, 110, 111)))
        for nothing in ([], None):
            assert send(bad_words=nothing).status_code == 200
            assert asked(api).grammar is None and asked(api).bias == []


def test_responses_and_messages_take_the_words_too(api: Any) -> None:
    said = [{"role": "user", "content": "hi"}]
    for path, fields in (("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": said, "max_tokens": 4})):
        assert api.post(path, {"model": "fake", "bad_words": ["x"], **fields}).status_code == 200
        assert asked(api).bias == [LogitBias(ord("x"), -math.inf)]


def test_any_text_without_some_words_may_ignore_its_end_but_a_grammar_may_not(api: Any) -> None:
    def stops(**fields: Any) -> bool:
        assert api.complete(ignore_eos=True, **fields).status_code == 200
        last = [message for message in api.engine.sent if isinstance(message, NewRequest)][-1]
        return bool(last.stop_token_ids)

    assert not stops(bad_words=["no"])
    assert stops(bad_words=["no"], guided_regex="a") and stops(guided_regex="a")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"bad_words": "x"}, "bad_words", "list"),
        ({"bad_words": [""]}, "bad_words[0]", "character"),
        ({"bad_words": [" "]}, "bad_words", "only spaces"),
        ({"bad_words": ["x", 5]}, "bad_words[1]", "string"),
        ({"bad_words": ["x" * 129]}, "bad_words[0]", "128"),
        ({"bad_words": ["x"] * 129}, "bad_words", "128"),
        ({"bad_words": [str(n) * 128 for n in range(9)]}, "bad_words", "more than 2048 tokens"),
        ({"bad_words": ["no"], "min_tokens": 1}, "min_tokens", "several tokens"),
        ({"bad_words": ["x"], "use_beam_search": True}, "bad_words", "beam search"),
    ],
)
def test_words_that_cannot_be_forbidden_are_refused(
    api: Any, error: Any, fields: dict[str, Any], param: str, said: str
) -> None:
    for send in (api.complete, api.chat):
        response = send(**fields)
        assert response.status_code == 400
        assert error(response)["param"] == param and said in error(response)["message"]


def test_words_need_a_tokenizer(make_api: Any, error: Any, tmp_path: Path) -> None:
    response = make_api(model=tmp_path).complete(prompt=[5], bad_words=["x"])
    assert response.status_code == 400 and "needs a tokenizer" in error(response)["message"]
