"""Beam search over HTTP, on the fake engine: it finds the prompt's first token likeliest, then ids from 0 up."""

from __future__ import annotations

from typing import Any

import pytest

from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine


def test_the_likeliest_texts_are_returned_best_first_with_their_log_probabilities(api: Any) -> None:
    asked = {"prompt": "ab", "max_tokens": 3, "n": 2, "num_beams": 4, "ignore_eos": True}
    answer = api.complete(**asked, logprobs=2, return_token_ids=True).json()
    first, second = answer["choices"]
    assert (first["text"], first["finish_reason"], first["index"]) == ("aaa", "length", 0)
    assert first["logprobs"]["token_logprobs"] == [-0.5] * 3 and first["logprobs"]["tokens"] == ["a"] * 3
    assert sum(second["logprobs"]["token_logprobs"]) == -2.5 and second["text"] != "aaa"
    assert [len(choice["token_ids"]) for choice in (first, second)] == [3, 3]
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 2
    requests = [message for message in api.engine.sent if isinstance(message, NewRequest)]
    assert [len(request.prompt) for request in requests] == [2, 3, 3, 3, 3, 4, 4, 4, 4]
    assert {request.max_tokens for request in requests} == {1}
    assert api.llm.num_open == 0 and not api.engine.open_ids


def test_a_chat_is_searched_too_and_prompts_of_a_completion_each_alone(api: Any) -> None:
    one = api.chat(use_beam_search=True, n=2, max_tokens=2, skip_special_tokens=False).json()["choices"]
    assert [choice["index"] for choice in one] == [0, 1] and all(c["message"]["content"] for c in one)
    both = api.complete(prompt=["ab", "cd"], use_beam_search=True, n=2, max_tokens=2, ignore_eos=True).json()
    texts = [choice["text"] for choice in both["choices"]]
    assert (texts[0], texts[2]) == ("aa", "cc") and len(texts) == 4


def test_a_stop_token_ends_a_text_and_is_not_shown(api: Any) -> None:
    answer = api.complete(prompt="ab", stop_token_ids=[ord("a")], num_beams=2, max_tokens=4, return_token_ids=True)
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("", "stop", [ord("a")])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [({"stream": True}, "stream", "send stream=false"), ({"temperature": 0.5}, "temperature", "leave it out"),
     ({"stop": "x"}, "stop", "send stop_token_ids"), ({"frequency_penalty": 1}, "frequency_penalty", "leave it out"),
     ({"response_format": {"type": "json_object"}}, "response_format", "leave it out"),
     ({"num_beams": 2, "n": 3}, "num_beams", "n is 3"), ({"num_beams": 30}, "num_beams", "at most"),
     ({"num_beams": 1000}, "num_beams", ""), ({"length_penalty": 1e9}, "length_penalty", ""),
     ({"early_stopping": "always"}, "early_stopping", "")],
)  # fmt: skip
def test_unsupported_beam_searches_are_refused_with_the_field(
    api: Any, error: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    asked = {"prompt": "ab", "use_beam_search": True, "num_beams": 4, "max_tokens": 2, **fields}
    response = api.complete(**asked)
    assert response.status_code == 400, response.text
    assert error(response)["param"].split(".")[0] == param and words in error(response)["message"]


def test_fields_of_a_search_without_one_are_refused_unless_they_change_nothing(api: Any, error: Any) -> None:
    for field, value in (("length_penalty", 2.0), ("early_stopping", True)):
        assert error(api.complete(**{field: value}))["param"] == field
    assert error(api.complete(use_beam_search=False, num_beams=3))["param"] == "num_beams"
    for value in ({"length_penalty": 1}, {"early_stopping": False}, {"num_beams": 1}, {"use_beam_search": False}):
        assert api.complete(**value).status_code == 200
    assert error(api.complete(num_beams=2, best_of=2))["param"] == "best_of"


def test_a_failing_step_ends_the_search_with_its_reason(make_api: Any, error: Any, eventually: Any) -> None:
    import threading

    api = make_api()
    api.engine.hold()

    def fail() -> None:
        eventually(lambda: bool(api.engine.open_ids))
        api.engine.fail(api.engine.open_ids[0], "the kernel broke")

    thread = threading.Thread(target=fail)
    thread.start()
    response = api.complete(prompt="ab", num_beams=2, max_tokens=3)
    thread.join()
    assert response.status_code == 500 and "the kernel broke" in error(response)["message"]
    assert api.llm.num_open == 0


def test_time_that_is_over_ends_the_search_with_the_texts_so_far(make_api: Any, eventually: Any) -> None:
    import threading

    api = make_api(FakeEngine(hold_after=3))

    def expire() -> None:
        eventually(lambda: api.engine.steps_left == 0 and bool(api.engine.open_ids))
        for name in api.engine.open_ids:
            api.engine.expire(name)

    thread = threading.Thread(target=expire)
    thread.start()
    response = api.complete(prompt="ab", num_beams=2, max_tokens=9, max_time=60, ignore_eos=True)
    thread.join()
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "timeout" and 0 < len(choice["text"]) < 9
