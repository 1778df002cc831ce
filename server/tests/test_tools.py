"""Tools and reasoning over HTTP: what clients send, and messages as they get them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.errors import UnknownNameError
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer
from evener_server.options import ServerOptions
from evener_server.parsers import Parsers

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'Let me look.\n{CALL}\n<tool_call>{{"name": "now"}}</tool_call>'


def ask(api: Any, **fields: Any) -> Any:
    response = api.chat(max_tokens=..., **fields)
    assert response.status_code == 200, response.text
    return response


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def test_calls_are_separated_from_content(says: Callable[..., Any]) -> None:
    choice = ask(says(TWO), tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me look."
    calls = choice["message"]["tool_calls"]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [
        ("function", "get_weather"),
        ("function", "now"),
    ]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}, {}]
    assert len({call["id"] for call in calls}) == 2 and all(call["id"].startswith("call_") for call in calls)


def test_a_call_without_content_has_null_content(says: Callable[..., Any]) -> None:
    message = ask(says(CALL), tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_arguments_are_streamed_while_they_are_written(says: Callable[..., Any], sse: Callable[..., Any]) -> None:
    events = sse(ask(says(TWO), tools=[WEATHER], stream=True))
    message = joined(events)
    assert message["content"] == "Let me look." and message["finish_reason"] == "tool_calls"
    assert [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]] == [
        ("get_weather", {"city": "Paris"}), ("now", {}),
    ]  # fmt: skip
    pieces = [e for e in events[:-1] for c in e["choices"] if "tool_calls" in c["delta"]]
    assert len(pieces) >= 4, "names and arguments come apart"


def test_without_tools_the_same_text_is_content(says: Callable[..., Any]) -> None:
    api = says(CALL)
    different: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}]
    for fields in different:
        choice = ask(api, **fields).json()["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]


def test_parallel_calls_can_be_declined(says: Callable[..., Any], sse: Callable[..., Any]) -> None:
    api = says(TWO)
    assert len(ask(api, tools=[WEATHER], parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]) == 1
    events = sse(ask(api, tools=[WEATHER], parallel_tool_calls=False, stream=True))
    assert [call["name"] for call in joined(events)["tool_calls"]] == ["get_weather"]


def test_the_template_gets_tools_and_earlier_calls(says: Callable[..., Any]) -> None:
    api = says("It is sunny.")
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    response = ask(api, tools=[WEATHER], messages=history)
    assert response.json()["choices"][0]["message"]["content"] == "It is sunny."
    prompt = api.llm.tokenizer.decode(api.engine.sent[0].prompt, skip_special_tokens=False)
    assert '"description": "The weather of a city."' in prompt
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny" in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_separated(says: Callable[..., Any], sse: Callable[..., Any], stream: bool, opened: bool) -> None:
    text = ("" if opened else "<think>\n") + f"I need the weather.</think>\n\n{CALL}"
    fields: dict[str, Any] = {"tools": [WEATHER], "chat_template_kwargs": {"open_think": opened}}
    if stream:
        message = joined(sse(ask(says(text), stream=True, **fields)))
        assert [call["name"] for call in message["tool_calls"]] == ["get_weather"]
    else:
        message = ask(says(text), **fields).json()["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"]
        assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert message["reasoning"] == "I need the weather." and not message["content"]


def test_reasoning_that_the_template_opened_is_separated_though_the_prompt_was_cut(says: Callable[..., Any]) -> None:
    """The server then has the prompt's ids only; its end is decoded again."""
    fields = {"chat_template_kwargs": {"open_think": True}, "truncate_prompt_tokens": 20, "return_token_ids": True}
    body = ask(says("I see.</think>\n\nYes."), **fields).json()
    message = body["choices"][0]["message"]
    assert len(body["prompt_token_ids"]) == 20
    assert (message["reasoning"], message["content"]) == ("I see.", "Yes.")


def test_reasoning_can_be_left_out(says: Callable[..., Any]) -> None:
    message = ask(says("<think>hm</think>Yes."), include_reasoning=False).json()["choices"][0]["message"]
    assert message["content"] == "Yes." and not {"reasoning", "reasoning_content"} & message.keys()


def test_each_choice_has_calls_of_its_own(says: Callable[..., Any]) -> None:
    choices = ask(says(CALL), tools=[WEATHER], n=3, seed=1).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_log_probabilities_come_with_the_parts(says: Callable[..., Any], sse: Callable[..., Any]) -> None:
    events = sse(ask(says(CALL), tools=[WEATHER], stream=True, logprobs=True))
    tokens = [t["token"] for e in events[:-1] for c in e["choices"] for t in (c["logprobs"] or {}).get("content", [])]
    assert "".join(tokens).startswith(CALL)


def test_strict_is_named_as_ignored(says: Callable[..., Any]) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert "tools[].function.strict" in ask(says("Hi."), tools=[strict]).headers["x-ignored-fields"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "none or auto"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "not support"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [WEATHER] * 513}, "tools", "512"),
        ({"tools": "x"}, "tools", "list"),
    ],
)
def test_wrong_tools_are_refused(
    says: Callable[..., Any], error: Callable[..., Any], fields: dict[str, Any], param: str, said: str
) -> None:
    response = says("Hi.").chat(**fields)
    assert response.status_code == 400, response.text
    assert error(response)["param"] == param and said in error(response)["message"]


def test_a_template_without_tools_refuses_them(make_api: Any, error: Callable[..., Any]) -> None:
    response = make_api().chat(tools=[WEATHER])
    assert response.status_code == 400 and error(response)["param"] == "tools"
    assert "has no place for tools" in error(response)["message"]


def test_a_format_that_no_parser_knows_says_what_the_operator_can_name(
    says: Callable[..., Any], tmp_path: Path, error: Callable[..., Any]
) -> None:
    model = write_tiny_tokenizer(tmp_path / "other", "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    response = says("Hi.", model).chat(tools=[WEATHER])
    assert response.status_code == 400 and "server.tool_parser=deepseek_v3|" in error(response)["message"]


def test_a_parser_that_is_not_installed_is_an_error_at_the_start() -> None:
    with pytest.raises(UnknownNameError, match="hermes"):
        Parsers(ServerOptions(tool_parser="hermse"))
