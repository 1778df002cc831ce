"""Tools and reasoning over HTTP: what clients send, and messages as they get them, whole and streamed."""

from __future__ import annotations

import json
import re
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


def held(api: Any, **fields: Any) -> Any:
    """What the answer of a chat is held to: the structural tag that the engine gets."""
    ask(api, **fields)
    grammar = api.engine.sent[-1].sampling.grammar
    return None if grammar is None else json.loads(grammar.text)


def strict(tool: dict[str, Any] = WEATHER) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
THINK = {"begin": "<think>", "end": "</think>", "budget": None}
ARGUMENTS = {"additionalProperties": False, **WEATHER["function"]["parameters"]}  # type: ignore[dict-item]


def tag_of(name: str, schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


def test_a_required_call_is_held_to_the_schemas_of_all_tools(says: Callable[..., Any]) -> None:
    found = held(says(CALL), tools=[WEATHER, NOW], tool_choice="required")
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tags = found["format"]["elements"][1]
    assert tags == {
        "type": "tags_with_separator", "separator": "\n", "at_least_one": True, "stop_after_first": False,
        "tags": [tag_of("get_weather", ARGUMENTS), tag_of("now", nothing)],
    }  # fmt: skip
    assert found["reasoning"] == THINK, "the model may reason before"
    assert held(says(CALL), tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)["format"]["elements"][
        1
    ]["stop_after_first"]


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_before_a_forced_call_begins_where_the_template_left_it(
    says: Callable[..., Any], opened: bool
) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "chat_template_kwargs": {"open_think": opened}}
    text = ("" if opened else "<think>\n") + f"Hm.</think>\n{CALL}"
    api = says(text)
    message = ask(api, **fields).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm." and message["tool_calls"][0]["function"]["name"] == "get_weather"
    grammar = json.loads(api.engine.sent[0].sampling.grammar.text)
    assert grammar["reasoning"] == {**THINK, "begin": "" if opened else "<think>"}


def test_a_named_call_is_one_call_of_that_tool(says: Callable[..., Any], sse: Callable[..., Any]) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}}
    api = says('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    tags = held(api, **fields)["format"]["elements"][1]
    assert tags["stop_after_first"] and [tag["begin"] for tag in tags["tags"]] == [tag_of("now", {})["begin"]]
    message = joined(sse(ask(api, stream=True, **fields)))
    assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [("now", "{}")]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "stream"),
    [("required", True),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (("required", False), (NAMED, False), (NAMED, True)))],
)  # fmt: skip
def test_a_forced_call_that_is_cut_off_before_its_arguments_is_not_sent_as_text(
    says: Callable[..., Any], sse: Callable[..., Any], choice: Any, stream: bool
) -> None:
    api, fields = says(CALL), {"tools": [WEATHER], "tool_choice": choice, "stream": stream}
    whole = len(api.llm.tokenizer.encode(CALL))
    for limit in range(1, whole):
        response = api.chat(max_tokens=limit, **fields)
        assert response.status_code == 200, response.text
        answer = response if stream else response.json()["choices"][0]
        message = joined(sse(answer)) if stream else {**answer["message"], "finish_reason": answer["finish_reason"]}
        assert not message["content"] and message["finish_reason"] == "length", f"cut after {limit} tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_forced_call_that_is_cut_off_leaves_the_first_alone(
    says: Callable[..., Any], sse: Callable[..., Any], stream: bool
) -> None:
    api = says(f"{CALL}\n{CALL}")
    limit = len(api.llm.tokenizer.encode(f'{CALL}\n<tool_call>\n{{"nam'))
    response = api.chat(max_tokens=limit, tools=[WEATHER], tool_choice="required", stream=stream)
    if stream:
        message = joined(sse(response))
    else:
        choice = response.json()["choices"][0]
        message = {**choice["message"], "finish_reason": choice["finish_reason"]}
    assert not message["content"] and message["finish_reason"] == "length" and len(message["tool_calls"]) == 1


def test_a_call_that_the_model_chose_and_that_is_cut_off_is_still_text(says: Callable[..., Any]) -> None:
    api = says(CALL)
    text = CALL[: CALL.index("name")]
    choice = api.chat(max_tokens=len(api.llm.tokenizer.encode(text)), tools=[WEATHER]).json()["choices"][0]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "length"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_narrow_what_may_be_called(says: Callable[..., Any], mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = held(says("Hi."), tools=[WEATHER, NOW], tool_choice=choice)["format"]
    tags = found["elements"][1] if mode == "required" else found
    assert [tag["begin"] for tag in tags["tags"]] == [tag_of("now", {})["begin"]]
    assert tags["type"] == ("tags_with_separator" if mode == "required" else "triggered_tags")


def test_calls_of_strict_tools_are_held_to_their_schema_once_they_begin(says: Callable[..., Any]) -> None:
    api = says("Hi.")
    found = held(api, tools=[strict(), NOW])["format"]
    assert found == {
        "type": "triggered_tags", "triggers": ["<tool_call>"], "stop_after_first": False,
        "tags": [tag_of("get_weather", ARGUMENTS), tag_of("now", {"type": "object"})],
    }  # fmt: skip
    assert held(api, tools=[WEATHER]) is None, "an answer without strict tools is free"
    assert held(api, tools=[strict()], tool_choice="none") is None


def test_an_answer_with_a_form_and_tools_is_either(says: Callable[..., Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    found = held(says("5"), tools=[WEATHER], response_format=form)["format"]
    assert found["type"] == "or" and found["elements"][1] == {"type": "json_schema", "json_schema": {"type": "integer"}}
    assert found["elements"][0]["elements"][1]["tags"] == [tag_of("get_weather", ARGUMENTS)]
    found = held(says(CALL), tools=[WEATHER], response_format=form, tool_choice="required")["format"]
    assert found["type"] == "sequence", "a forced call is no other answer"


def test_strict_is_kept_where_calls_are_the_whole_answer(says: Callable[..., Any], tmp_path: Path) -> None:
    template = '{{ tools }}"parameters": dictionary of argument name and its value{% for m in messages %}{% endfor %}'
    api = says("Hi.", write_tiny_tokenizer(tmp_path / "llama", template))
    response = ask(api, tools=[strict()])
    assert "x-ignored-fields" not in response.headers
    found = json.loads(api.engine.sent[-1].sampling.grammar.text)["format"]
    calls, text = found["elements"]
    assert calls["elements"][1]["tags"][0]["content"] == {"type": "json_schema", "json_schema": ARGUMENTS}
    assert re.fullmatch(text["pattern"], "Hi.") and not re.fullmatch(text["pattern"], '{"name": "get_weather"')


def test_a_budget_of_reasoning_is_kept_by_the_grammar(says: Callable[..., Any], make_api: Any, error: Any) -> None:
    found = held(says("<think>hm</think>Yes."), thinking_token_budget=7)
    assert found == {"format": None, "reasoning": {**THINK, "budget": 7}}
    refused = make_api().chat(thinking_token_budget=7)
    assert refused.status_code == 400 and error(refused)["param"] == "thinking_token_budget"


def test_thinking_is_switched_by_its_own_field_or_the_templates(says: Callable[..., Any], tmp_path: Path) -> None:
    template = "{{ enable_thinking }} {{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    api = says("Hi.", write_tiny_tokenizer(tmp_path / "switch", template))
    for fields, text in [
        ({"enable_thinking": False}, "False False"),
        ({"enable_thinking": True}, "True True"),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, "True False"),
    ]:
        ask(api, **fields)
        assert api.llm.tokenizer.decode(api.engine.sent[-1].prompt).startswith(text)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", '"required"'),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", '"required"'),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", '"allowed_tools"'),
        ({"tool_choice": "required"}, "tool_choice", "tools is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [WEATHER], "tool_choice": "required", "min_tokens": 3}, "min_tokens", "forces a call"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}],
                "tool_choice": "required",
            },
            "tools",
            "strin",
        ),
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
    assert "server.chat_template=FILE" in error(response)["message"]


def test_tools_are_not_counted_where_a_request_with_them_is_refused(make_api: Any) -> None:
    api, said = make_api(), [{"role": "user", "content": "Hi."}]
    flat = {"type": "function", **WEATHER["function"]}
    for path, body in (
        ("/v1/responses/input_tokens", {"input": "Hi.", "tools": [flat]}),
        ("/v1/messages/count_tokens", {"messages": said, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ):
        assert api.post(path, {"model": "fake", **body, "tools": []}).status_code == 200, path
        refused = api.post(path, {"model": "fake", **body})
        assert refused.status_code == 400 and "no place for tools" in refused.json()["error"]["message"], path
    rendered = api.post("/tokenize", {"model": "fake", "messages": said, "tools": [WEATHER]})
    assert rendered.status_code == 200, "as in vLLM, it shows what the template makes of them"


def test_a_format_that_no_parser_knows_says_what_the_operator_can_name(
    says: Callable[..., Any], tmp_path: Path, error: Callable[..., Any]
) -> None:
    model = write_tiny_tokenizer(tmp_path / "other", "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    response = says("Hi.", model).chat(tools=[WEATHER])
    assert response.status_code == 400 and "server.tool_parser=deepseek_v3|" in error(response)["message"]


def test_a_parser_that_is_not_installed_is_an_error_at_the_start() -> None:
    with pytest.raises(UnknownNameError, match="hermes"):
        Parsers(ServerOptions(tool_parser="hermse"))
