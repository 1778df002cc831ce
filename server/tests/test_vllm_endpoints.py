"""Endpoints and options that clients of vLLM use: batches of chats, /invocations, /tokenizer_info, a root path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.errors import ConfigError
from evener_conformance.fake_engine import FakeEngine
from evener_server.options import ServerOptions


def chats(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def batch(api: Any, **fields: Any) -> Any:
    return api.post("/v1/chat/completions/batch", {"model": "fake", "max_tokens": 4, **fields})


def test_each_conversation_of_a_batch_has_the_answer_that_it_has_alone(api: Any) -> None:
    body = batch(api, messages=chats("one", "two", "three"), return_token_ids=True, logprobs=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice, text in zip(body["choices"], ("one", "two", "three"), strict=True):
        alone = api.chat(messages=chats(text)[0], return_token_ids=True, logprobs=True).json()
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
        (expected,) = alone["choices"]
        assert {**expected, "index": choice["index"]} == {name: choice[name] for name in expected}
    assert body["usage"]["completion_tokens"] == 12


def test_a_batch_may_call_tools_and_follow_a_schema(says: Callable[..., Any]) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    api = says('<think>hm</think><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    body = batch(api, messages=chats("a", "b"), tools=[tool], tool_choice="required", max_tokens=200).json()
    assert [each["message"]["tool_calls"][0]["function"]["name"] for each in body["choices"]] == ["now", "now"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * len("hm")}
    assert all(request.sampling.grammar is not None for request in api.engine.sent)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": chats("a"), "stream": True}, "stream"),
        ({"messages": chats("a"), "n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages[0]"),
        ({"messages": chats("a") * 1025}, "messages"),
        ({"messages": [*chats("a"), chats("x" * 100_000)[0]]}, "messages"),
    ],
)
def test_wrong_batches_are_refused(api: Any, error: Callable[..., Any], fields: Any, param: str) -> None:
    response = batch(api, **fields)
    assert response.status_code == 400, response.text
    assert error(response)["param"] == param


def test_invocations_are_chats_or_completions(api: Any, error: Callable[..., Any]) -> None:
    chat = api.post("/invocations", {"messages": chats("hi")[0], "max_tokens": 4}).json()
    assert chat["object"] == "chat.completion" and chat["choices"] == api.chat().json()["choices"]
    text = api.post("/invocations", {"prompt": "hello", "max_tokens": 4}).json()
    assert text["object"] == "text_completion" and text["choices"][0]["text"] == "hell"
    assert error(api.post("/invocations", {}))["param"] == "prompt"


def test_tools_that_may_not_be_called_are_shown_where_the_operator_says_so(says: Callable[..., Any]) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    for exclude, shown in (True, False), (False, True):
        api = says("Noon.", options=ServerOptions(exclude_tools_when_tool_choice_none=exclude))
        for fields in {}, {"truncate_prompt_tokens": -1}:  # the engine renders the conversation, and the server
            answer = api.chat(tools=[tool], tool_choice="none", **fields)
            assert answer.json()["choices"][0]["message"]["content"] == "Noon"
            prompt = api.llm.tokenizer.decode(api.engine.sent[-1].prompt, skip_special_tokens=False)
            assert ('"now"' in prompt) is shown
    assert ServerOptions().exclude_tools_when_tool_choice_none


def test_the_tokenizers_settings_are_shown_where_the_operator_says_so(
    make_api: Callable[..., Any], folder: Path
) -> None:
    engine = {"info_overrides": {"model": str(folder)}}
    from evener_conformance.fake_engine import FakeEngine

    hidden = make_api(FakeEngine(**engine)).get("/tokenizer_info")
    assert hidden.status_code == 404
    shown = make_api(FakeEngine(**engine), options=ServerOptions(tokenizer_info=True)).get("/tokenizer_info").json()
    assert shown["tokenizer_class"] == "PreTrainedTokenizerFast" and shown["eos_token"] == "<|im_end|>"
    assert "message.role" in shown["chat_template"]


def test_a_root_path_is_taken_from_every_route(make_api: Callable[..., Any]) -> None:
    api = make_api(options=ServerOptions(root_path="/llm/"))
    assert api.get("/llm/v1/models").json() == api.get("/v1/models").json()
    assert api.get("/llmv1/models").status_code == 404
    assert api.post("/llm/v1/completions", {"prompt": "hello", "max_tokens": 2}).json()["choices"][0]["text"] == "he"


def test_streams_end_with_the_usage_where_the_operator_says_so(make_api: Callable[..., Any], sse: Any) -> None:
    api = make_api(options=ServerOptions(force_include_usage=True))
    for response in (api.chat(stream=True), api.complete(stream=True)):
        *chunks, last, done = sse(response)
        assert done == "[DONE]" and last["usage"]["completion_tokens"] == 4 and last["choices"] == []
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(set(counts)) and counts[-1] == 4, "each chunk counts more tokens than the one before"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    plain = api.chat(stream=True, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in sse(plain)[:-2]), "what the request says counts"


def test_tokens_are_named_by_their_ids_where_the_operator_says_so(make_api: Callable[..., Any]) -> None:
    api = make_api(options=ServerOptions(token_ids=True))
    asked = {"logprobs": 1, "max_tokens": 1, "prompt": "a"}
    assert api.complete(**asked).json()["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]
    plain = api.complete(**asked, return_tokens_as_token_ids=False).json()
    assert plain["choices"][0]["logprobs"]["tokens"] == ["a"]


def test_reasoning_has_the_operators_budget_unless_the_request_has_one(says: Callable[..., Any]) -> None:
    api = says("<think>hm</think>Yes.", options=ServerOptions(thinking_budget=64))
    for fields, budget in (({}, 64), ({"thinking_token_budget": 5}, 5)):
        assert api.chat(**fields).status_code == 200
        assert f'"budget": {budget}' in api.engine.sent[-1].sampling.grammar.text


def test_a_chat_template_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }} é", "utf-8")
    assert ServerOptions(chat_template=str(path)).read_chat_template() == "{{ messages }} é"
    assert ServerOptions().read_chat_template() is None
    for content in (b"\xff", b"x" * ((1 << 20) + 1)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"server\.chat_template=.*cannot be used"):
            ServerOptions(chat_template=str(path)).read_chat_template()
    with pytest.raises(ConfigError, match="No such file"):
        ServerOptions(chat_template=str(tmp_path / "absent")).read_chat_template()


def test_the_usage_counts_tokens_of_reasoning(says: Callable[..., Any], sse: Callable[..., Any]) -> None:
    api = says("<think>\nI add.</think>\n\nIt is 4.")
    fields: dict[str, Any] = {"include_reasoning": False, "max_tokens": ...}
    usage = api.chat(**fields).json()["usage"]
    streamed = sse(api.chat(**fields, stream=True, stream_options={"include_usage": True}))[-2]["usage"]
    for each in (usage, streamed):
        assert each["completion_tokens_details"] == {"reasoning_tokens": len("I add.")}


def test_answers_have_the_times_of_their_request(make_api: Any, sse: Any) -> None:
    api = make_api(options=ServerOptions(request_metrics=True))
    names = ["queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"]
    for whole in api.chat().json(), api.complete(n=2).json():
        assert list(whole["metrics"]) == names and min(whole["metrics"].values()) >= 0
    for answer in api.chat, api.complete:
        *chunks, last, done = sse(answer(max_tokens=1, stream=True, stream_options={"include_usage": True}))
        assert done == "[DONE]" and list(last["metrics"]) == [name for name in names if name != "mean_itl_ms"]
        assert not any("metrics" in chunk for chunk in chunks)


def test_answers_have_no_times_by_default(api: Any) -> None:
    assert "metrics" not in api.chat().json() and "metrics" not in api.complete().json()


def test_cached_tokens_are_not_shown_where_the_operator_says_so(make_api: Callable[..., Any], sse: Any) -> None:
    shown, hidden = (
        make_api(FakeEngine(cached=2), options=ServerOptions(show_cached_tokens=show)) for show in (True, False)
    )
    assert shown.chat().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert hidden.chat().json()["usage"].keys() == counts
    assert hidden.complete().json()["usage"].keys() == counts
    *_, last, _ = sse(hidden.chat(stream=True, stream_options={"include_usage": True}))
    assert last["usage"].keys() == counts
    body = {"input": "hello", "max_output_tokens": 4}
    for api, cached in (shown, 2), (hidden, 0):
        assert api.post("/v1/responses", body).json()["usage"]["input_tokens_details"]["cached_tokens"] == cached
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    usage = hidden.post("/v1/messages", message).json()["usage"]
    assert usage["cache_read_input_tokens"] is None and usage["input_tokens"] == len(hidden.engine.sent[-1].prompt)
