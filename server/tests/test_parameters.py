"""Parameters over HTTP: what reaches the engine, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from evener.engine.wire.messages import LogitBias, NewRequest
from evener_conformance.fake_engine import FakeEngine
from evener_server.protocol import ChatBody, CompletionBody, parse_body


def sent(api: Any) -> list[NewRequest]:
    return [message for message in api.engine.sent if isinstance(message, NewRequest)]


def test_penalties_biases_and_limits_reach_the_engine(make_api: Any) -> None:
    api = make_api()
    fields = {
        "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.25, "logit_bias": {"5": 3, "7": 0},
        "stop_token_ids": [9, 4], "min_tokens": 2, "max_time": 30,
    }  # fmt: skip
    assert api.chat(**fields).status_code == api.complete(**fields).status_code == 200
    for message in sent(api):
        sampling = message.sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -1, 1.25)
        assert {4, 9} <= set(message.stop_token_ids) and 25 < message.max_time <= 30
        assert sampling.bias[0] == LogitBias(5, 3.0)
        assert sampling.bias[1:] == [LogitBias(token, -float("inf"), 2) for token in message.stop_token_ids]


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(api: Any) -> None:
    body = api.complete(prompt="abcd", max_tokens=9, stop_token_ids=[ord("c")]).json()
    assert body["choices"][0]["text"] == "ab" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


def test_no_stop_string_is_looked_for_in_the_first_min_tokens(api: Any) -> None:
    assert api.complete(prompt="ab", max_tokens=9, stop="b").json()["choices"][0]["text"] == "a"
    assert api.complete(prompt="ab", max_tokens=9, stop="b", min_tokens=2).json()["choices"][0]["text"] == "aba"


def joined(events: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    text, logprobs = "", dict[str, list[Any]]()
    for event in events[:-1]:
        (choice,) = event["choices"]
        text += choice["text"]
        for key, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(key, []).extend(values)
    return text, logprobs


@pytest.mark.parametrize("prompt", ["hé!", [ord(c) for c in "abc"]])
def test_echo_begins_with_the_prompt_and_its_log_probabilities(api: Any, sse: Any, prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else "abc"
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 2}
    body = api.complete(**asked).json()
    (choice,) = body["choices"]
    ids = len(text.encode())
    assert choice["text"].startswith(text) and len(choice["text"]) > len(text)
    logprobs = choice["logprobs"]
    assert [len(logprobs[key]) for key in logprobs] == [ids + 2] * 4
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (ids + 1) and logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2 and logprobs["text_offset"][ids] == len(text)
    assert body["usage"] == {**body["usage"], "prompt_tokens": ids, "completion_tokens": 2}
    assert joined(sse(api.complete(**asked, stream=True))) == (choice["text"], logprobs)
    assert joined(sse(api.complete(**{**asked, "logprobs": None}, stream=True))) == (choice["text"], {})
    assert api.complete(**{**asked, "logprobs": None}).json()["choices"][0]["logprobs"] is None


def test_every_choice_is_echoed_though_only_the_first_sample_scores_the_prompt(make_api: Any, sse: Any) -> None:
    api = make_api()
    body = api.complete(prompt=["ab", "xyz"], n=2, max_tokens=1, echo=True, logprobs=0).json()
    assert [choice["text"] for choice in body["choices"]] == ["aba", "aba", "xyzx", "xyzx"]
    assert [message.sampling.prompt_logprobs for message in sent(api)] == [0, None, 0, None]
    events = sse(api.complete(prompt=["ab", "xyz"], n=2, max_tokens=1, echo=True, logprobs=0, stream=True))
    for index, choice in enumerate(body["choices"]):
        mine = [event for event in events[:-1] if event["choices"][0]["index"] == index]
        assert joined([*mine, "[DONE]"]) == (choice["text"], choice["logprobs"])


def test_echo_with_no_new_tokens_gives_the_prompt_alone(api: Any, sse: Any) -> None:
    body = api.complete(prompt="abc", max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = body["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 3
    assert joined(sse(api.complete(prompt="abc", max_tokens=0, echo=True, logprobs=1, stream=True)))[0] == "abc"


def by_sample(request: NewRequest) -> list[int]:
    """Sample i answers with 5, 2, 4 or 3 tokens: each costs 0.5, so that the shortest is the likeliest."""
    index = int(request.id.rpartition("-")[2])
    return [ord("a") + index] * [5, 2, 4, 3][index]


def test_best_of_keeps_the_likeliest_and_bills_all(make_api: Any) -> None:
    api = make_api(FakeEngine(by_sample))
    asked: dict[str, Any] = {"prompt": "xy", "n": 2, "best_of": 4, "max_tokens": 9}
    body = api.complete(**asked).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "bb"), (1, "ddd")]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 14 and body["usage"]["prompt_tokens"] == 2
    told = api.complete(**asked, logprobs=1, echo=True).json()["choices"]
    assert [choice["text"] for choice in told] == ["xybb", "xyddd"]
    assert [len(choice["logprobs"]["tokens"]) for choice in told] == [4, 5]
    assert api.llm.num_open == 0


def test_best_of_equal_to_n_changes_nothing(api: Any, sse: Any) -> None:
    asked: dict[str, Any] = {"prompt": "ab", "n": 2, "max_tokens": 3}
    plain, same = (api.complete(**asked, **extra).json() for extra in ({}, {"best_of": 2}))
    assert plain["choices"] == same["choices"] and plain["usage"] == same["usage"]
    assert sse(api.complete(**asked, best_of=2, stream=True))[-1] == "[DONE]"


def test_a_failed_sample_of_many_fails_the_request(make_api: Any, error: Any, eventually: Any) -> None:
    import threading

    api = make_api(FakeEngine(by_sample, hold_after=1))

    def fail() -> None:
        eventually(lambda: len(api.engine.open_ids) == 4)
        api.engine.fail(api.engine.open_ids[2], "it broke")
        api.engine.release()

    thread = threading.Thread(target=fail)
    thread.start()
    response = api.complete(prompt="xy", best_of=4, max_tokens=9)
    thread.join()
    assert response.status_code == 500 and "it broke" in error(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_a_504_that_nobody_repeats(
    make_api: Any, error: Any, eventually: Any, stream: bool
) -> None:
    import threading

    api = make_api()
    api.engine.hold()

    def expire() -> None:
        eventually(lambda: bool(api.engine.open_ids))
        api.engine.expire(api.engine.open_ids[0])

    thread = threading.Thread(target=expire)
    thread.start()
    response = api.chat(max_time=5, stream=stream)
    thread.join()
    assert response.status_code == 504 and error(response)["code"] == "deadline_exceeded"
    assert error(response)["param"] == "max_time" and response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_after_some_tokens_ends_the_answer_with_what_there_is(
    make_api: Any, sse: Any, eventually: Any, stream: bool
) -> None:
    import threading

    api = make_api(FakeEngine(hold_after=2))

    def expire() -> None:
        eventually(lambda: api.engine.steps_left == 0)
        api.engine.expire(api.engine.open_ids[0])

    thread = threading.Thread(target=expire)
    thread.start()
    response = api.complete(prompt="abcd", max_tokens=9, max_time=5, stream=stream)
    thread.join()
    assert response.status_code == 200
    if stream:
        *_, last, done = sse(response)
        assert last["choices"][0]["finish_reason"] == "timeout" and done == "[DONE]"
    else:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "timeout")


def test_template_variables_reach_the_template(api: Any) -> None:
    shouted = api.chat(chat_template_kwargs={"unused": 1, "enable_thinking": False})
    assert shouted.status_code == 200, shouted.text
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    whole, going_on = (api.chat(messages=talk, **extra).json() for extra in ({}, {"continue_final_message": True}))
    assert going_on["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    bare = api.chat(messages=talk, add_generation_prompt=False).json()
    assert going_on["usage"]["prompt_tokens"] < bare["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]


def test_both_bodies_give_the_same_parameters() -> None:
    fields: dict[str, Any] = {
        "model": "m", "temperature": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4, "logit_bias": {"1": 2},
        "frequency_penalty": 1, "presence_penalty": 2, "repetition_penalty": 1.5, "stop_token_ids": [3],
        "min_tokens": 1, "max_time": 2.0, "max_tokens": 3, "stop": ["x"], "n": 2, "ignore_eos": True,
    }  # fmt: skip
    chat, _ = parse_body(ChatBody, {**fields, "messages": [{"role": "user", "content": "a"}]})
    completion, _ = parse_body(CompletionBody, {**fields, "prompt": "a"})
    assert chat.sampling(detokenize=True) == completion.sampling(detokenize=True)
    assert chat.sampling(detokenize=True).logit_bias == {1: 2.0}
