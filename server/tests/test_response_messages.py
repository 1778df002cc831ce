"""``enable_response_messages`` and ``previous_input_messages``: messages out, and back in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

#: As gpt-oss has it, in short.
HARMONY = """{%- macro say(head, text, end='<|end|>') %}<|start|>{{ head }}<|message|>{{ text }}{{ end }}{% endmacro -%}
{{ say('system', 'You are ChatGPT.') }}
{%- if messages[0].role in ('system', 'developer') %}{{ say('developer', messages[0].content) }}{% endif %}
{%- if tools %}{{ say('developer', '# Tools ' ~ tools | tojson) }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}{{ say('functions.f to=assistant<|channel|>commentary', message.content) }}
  {%- elif message.role == 'user' %}{{ say('user', message.content) }}
  {%- elif message.role == 'assistant' %}
    {%- if message.reasoning %}{{ say('assistant<|channel|>analysis', message.reasoning) }}{% endif %}
    {%- if message.content %}{{ say('assistant<|channel|>final', message.content) }}{% endif %}
    {%- for call in message.tool_calls or [] %}
      {{- say('assistant to=functions.' ~ call.function.name ~ '<|channel|>commentary json',
              call.function.arguments | tojson, '<|call|>') }}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
ANSWER = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"sign": "Aries"}<|call|>'
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"sign": {"type": "string"}}}}


@pytest.fixture
def harmony(says: Callable[..., Any], tmp_path: Path) -> Callable[[str], Any]:
    """A server of a model with the format of gpt-oss, which answers with the given text."""
    folder = write_tiny_tokenizer(tmp_path / "harmony", HARMONY)
    return lambda text: says(text, model=folder)


def respond(api: Any, **fields: Any) -> dict[str, Any]:
    response = api.post("/v1/responses", {"input": "hi", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def prompt(api: Any) -> str:
    return str(api.llm.tokenizer.decode(api.engine.sent[-1].prompt, skip_special_tokens=False))


def told(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(each["role"], each.get("channel"), each["content"][0]["text"]) for each in messages]


def test_messages_of_gpt_oss_are_those_of_its_prompt_and_its_answer(harmony: Callable[[str], Any]) -> None:
    api = harmony(ANSWER)
    body = respond(api, instructions="Be brief.", tools=[TOOL], enable_response_messages=True)
    assert told(body["input_messages"][:2]) == [
        ("system", None, "You are ChatGPT."), ("developer", None, "Be brief."),
    ]  # fmt: skip
    assert told(body["input_messages"][3:]) == [("user", None, "hi")]
    thought, call, *rest = body["output_messages"]
    # The token at the end of the tiny model's answers is no mark of the format.
    assert told(rest) == [("assistant", None, "<|im_end|>")]
    assert told([thought, call]) == [
        ("assistant", "analysis", "I look."), ("assistant", "commentary", '{"sign": "Aries"}'),
    ]  # fmt: skip
    assert (call["recipient"], call["content_type"]) == ("functions.f", "<|constrain|>json")
    assert "input_messages" not in respond(api)


def test_messages_of_a_stream_come_with_its_first_and_its_last_event(harmony: Callable[[str], Any]) -> None:
    api = harmony("<|channel|>final<|message|>Hello.")
    response = api.post("/v1/responses", {"input": "hi", "stream": True, "enable_response_messages": True})
    events = [json.loads(each.partition("\ndata: ")[2]) for each in response.text.split("\n\n")[:-1]]
    first, last = events[0]["response"], events[-1]["response"]
    assert told(first["input_messages"]) == [("system", None, "You are ChatGPT."), ("user", None, "hi")]
    assert first["output_messages"] == [] and first["input_messages"] == last["input_messages"]
    assert told(last["output_messages"]) == [("assistant", "final", "Hello.<|im_end|>")]


def test_messages_go_back_in_as_the_conversation_that_they_are_of(harmony: Callable[[str], Any]) -> None:
    first = respond(harmony(ANSWER), instructions="Be brief.", tools=[TOOL], enable_response_messages=True)
    said = [*first["input_messages"], *first["output_messages"][:2]]
    result = {"role": "tool", "name": "functions.f", "content": [{"type": "text", "text": "An otter."}]}
    api = harmony("<|channel|>final<|message|>Otter.")
    second = respond(api, input="Well?", previous_input_messages=[*said, result], enable_response_messages=True)
    assert told(second["input_messages"]) == [
        ("system", None, "You are ChatGPT."), ("user", None, "hi"), ("assistant", "analysis", "I look."),
        ("assistant", "commentary", '{"sign": "Aries"}'), ("tool", "commentary", "An otter."), ("user", None, "Well?"),
    ], "the system's messages are those of the new request"  # fmt: skip
    third = respond(api, input="And?", previous_response_id=second["id"], enable_response_messages=True)
    assert told(third["input_messages"])[1:5] == told(second["input_messages"])[1:5]


def test_a_model_of_another_format_goes_on_from_messages_too_and_shows_its_own_text(says: Callable[..., Any]) -> None:
    api = says("Yes.")
    body = respond(api, tools=[TOOL], enable_response_messages=True, previous_input_messages=[
        {"author": {"role": "user"}, "content": "Aries?"},
        {"role": "assistant", "content": "Look:", "reasoning": "hm", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"sign": "Aries"}'}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "b", "content": "none"}, {"role": "tool", "name": "f", "content": "otter"},
        {"role": "assistant", "recipient": "functions.f", "content": "{}", "channel": "commentary"},
        {"role": "tool", "name": "functions.f", "content": "again"},
    ])  # fmt: skip
    read = prompt(api)
    assert "<|im_start|>user\nAries?<|im_end|>" in read and "Look:<tool_call>" in read
    assert read.count("<tool_call>{") == 3 + 1, "three calls, and the template's own words"
    assert [read.index(text) for text in ("none", "otter", "again", "hi")] == sorted(
        read.index(text) for text in ("none", "otter", "again", "hi")
    )
    (shown,) = body["input_messages"]
    assert shown["type"] == "raw_message_tokens" and shown["message"] == read


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([{"role": "robot", "content": "x"}], "[0].role", "send messages with the role user"),
        ([{"type": "raw_message_tokens", "tokens": [1], "message": "x"}], "[0].role", "None"),
        ([{"role": "user", "content": 3}], "[0].content", "must be a string or a list"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "name": "functions.f", "content": "x"}], "[1]", "'f'"),
        ([{"role": "assistant", "recipient": "python", "content": "1"}], "[0].recipient", "functions.NAME"),
        ([{"role": "assistant", "recipient": "functions.f", "content": [3]}], "[0].content", "parts with a text"),
        ([{"role": "assistant", "channel": "analysis", "content": None}], "[0].content", "must be a text"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "[0]", "must be an object"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}], "[0].name", "must be a string"),
    ],
)
def test_messages_of_a_wrong_form_are_refused_by_name(
    says: Callable[..., Any], error: Callable[..., Any], messages: list[Any], param: str, words: str
) -> None:
    found = error(says("x").post("/v1/responses", {"input": "hi", "previous_input_messages": messages}))
    assert found["param"] == f"previous_input_messages{param}" and words in found["message"], found


def test_messages_and_an_earlier_response_cannot_both_be_gone_on_from(
    says: Callable[..., Any], error: Callable[..., Any]
) -> None:
    both = {"previous_input_messages": [{"role": "user", "content": "a"}], "previous_response_id": "resp_1"}
    found = error(says("x").post("/v1/responses", {"input": "hi", **both}))
    assert found["param"] == "previous_input_messages" and "send one of them" in found["message"]
