"""Chat completions: what they answer, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine
from evener_server.messages import Message

EOS = 258


def _says(text: str, *more: int) -> FakeEngine:
    return FakeEngine(lambda request: [*text.encode(), *more])


def _sent(api: Any) -> NewRequest:
    return next(m for m in reversed(api.engine.sent) if isinstance(m, NewRequest))


def test_an_answer_has_the_shape_of_openai(make_api: Any) -> None:
    body = make_api(_says("Hello.", EOS)).chat(max_tokens=20).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "fake"
    assert body["system_fingerprint"] == "evener-0.1.0-fake"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": None,
        }
    ]
    assert body["prompt_token_ids"] is None and body["prompt_logprobs"] is None, "clients of vLLM look for them"
    assert body["usage"] == {
        "prompt_tokens": 21, "completion_tokens": 7, "total_tokens": 28, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_limit_on_tokens_ends_with_length_under_either_name(make_api: Any) -> None:
    api = make_api(_says("Hello."))
    for fields in ({"max_tokens": 3}, {"max_tokens": ..., "max_completion_tokens": 3}):
        choice = api.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == "Hel" and choice["finish_reason"] == "length"


def test_a_stream_has_role_then_text_then_reason_then_usage_then_done(make_api: Any, sse: Any) -> None:
    response = make_api(_says("Hé!", EOS)).chat(max_tokens=20, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, *middle, usage, done = sse(response)
    *texts, last = middle
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts) == "Hé!"
    assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in texts)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [first, *middle, usage]}) == 1


def test_a_stream_without_include_usage_has_no_usage_at_all(make_api: Any, sse: Any) -> None:
    events = sse(make_api(_says("Hi", EOS)).chat(stream=True))
    assert not any("usage" in event for event in events[:-1])


def test_n_samples_are_streamed_under_their_indices(make_api: Any, sse: Any) -> None:
    api = make_api(_says("ab"))
    events = sse(api.chat(stream=True, n=3, max_tokens=2))[:-1]
    by_index: dict[int, str] = {}
    for event in events:
        choice = event["choices"][0]
        by_index[choice["index"]] = by_index.get(choice["index"], "") + choice["delta"].get("content", "")
    assert by_index == {0: "ab", 1: "ab", 2: "ab"}
    body = api.chat(n=3, max_tokens=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 6 and body["usage"]["prompt_tokens"] == 21


def test_cached_tokens_are_in_the_usage(make_api: Any) -> None:
    usage = make_api(FakeEngine(cached=16)).chat(n=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


def test_a_stop_string_ends_the_answer_and_is_not_shown(make_api: Any, sse: Any) -> None:
    api = make_api(_says("one, two, three"))
    choice = api.chat(stop=[", t", "zzz"], max_tokens=15).json()["choices"][0]
    assert choice["message"]["content"] == "one" and choice["finish_reason"] == "stop"
    events = sse(api.chat(stop=", t", max_tokens=15, stream=True))[1:-1]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "one"


@pytest.mark.parametrize(
    ("fields", "default", "stops"),
    [({}, True, True), ({}, False, False), ({"ignore_eos": True}, True, False), ({"stop_with_eos": False}, True, False),
     ({"stop_with_eos": True}, False, True), ({"ignore_eos": False}, False, True)],
)  # fmt: skip
def test_requests_and_the_server_say_whether_eos_ends_an_answer(
    make_api: Any, fields: dict[str, bool], default: bool, stops: bool
) -> None:
    api = make_api(stop_with_eos=default)
    assert api.chat(**fields).status_code == 200
    assert _sent(api).stop_token_ids == ([EOS] if stops else [])


def test_sampling_parameters_reach_the_engine(make_api: Any) -> None:
    api = make_api()
    assert api.chat(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=42, max_tokens=5).status_code == 200
    request = _sent(api)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        7,
        0.1,
        42,
    )
    assert request.max_tokens == 5 and sampling.logprobs is None


def test_the_servers_own_limit_holds_for_requests_that_do_not_say_and_is_cut_to_the_context(make_api: Any) -> None:
    api = make_api(max_tokens=3)
    assert api.chat(max_tokens=...).json()["usage"]["completion_tokens"] == 3
    assert api.chat(max_tokens=5).json()["usage"]["completion_tokens"] == 5
    api = make_api(max_tokens=1000)
    assert api.chat(max_tokens=..., ignore_eos=True).json()["usage"]["total_tokens"] == 128
    assert api.chat(max_tokens=1000).status_code == 400


def test_every_role_and_parts_of_text_reach_the_template(make_api: Any) -> None:
    api = make_api()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": []},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    assert api.chat(messages=messages).status_code == 200
    text = bytes(i for i in _sent(api).prompt if i < 256).decode()
    assert text == "system\nbe brief\nuser\na\nb\nassistant\nc\ntool\nd\nassistant\n"


def test_an_answer_can_be_sent_back_as_it_came(make_api: Any) -> None:
    api = make_api()
    answer = api.chat().json()["choices"][0]["message"]
    assert (
        api.chat(messages=[{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"}]).status_code
        == 200
    )


def test_a_call_that_was_put_together_from_a_stream_can_be_sent_back(says: Any) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed": {}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "b"}]  # fmt: skip
    response = says("Hi.").chat(messages=messages)
    assert response.status_code == 200, response.text


def test_a_refusal_is_read_as_the_text_that_it_is(make_api: Any) -> None:
    api = make_api()
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    response = api.chat(messages=[{"role": "user", "content": "a"}, refusal, {"role": "user", "content": "b"}])
    assert response.status_code == 200 and "x-ignored-fields" not in response.headers
    text = bytes(i for i in _sent(api).prompt if i < 256).decode()
    assert text == "user\na\nassistant\nNo.\nuser\nb\nassistant\n"


def test_a_model_without_a_template_says_so(make_api: Any, error: Any, tmp_path: Any) -> None:
    from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

    api = make_api(model=write_tiny_tokenizer(tmp_path, chat_template=None))
    response = api.chat()
    assert response.status_code == 400 and "chat template" in error(response)["message"]
    assert error(response)["param"] == "messages"


def test_logprobs_have_openais_shape_whole_and_streamed(make_api: Any, sse: Any) -> None:
    api = make_api(_says("hé"))
    whole = api.chat(logprobs=True, top_logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["h", "\\xc3", "\\xa9"]
    assert bytes(byte for entry in whole["content"] for byte in entry["bytes"]).decode() == "hé"
    assert [top["logprob"] for top in whole["content"][0]["top_logprobs"]] == [-0.5, -1.5]
    events = sse(api.chat(logprobs=True, top_logprobs=2, max_tokens=3, stream=True))[:-1]
    streamed = [e for event in events for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["content"]


def test_logprobs_without_top_logprobs_have_an_empty_list_of_them(make_api: Any) -> None:
    entries = make_api(_says("h")).chat(logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    assert entries[0]["top_logprobs"] == [] and entries[0]["logprob"] == -0.5


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_an_earlier_answer_reaches_the_template_under_each_of_its_names(name: str) -> None:
    message = {"role": "assistant", "content": "Yes.", name: "I see."}
    both = {**message, "reasoning": "I see.", "reasoning_content": "I see."}
    assert Message.model_validate(message).plain() == both
