"""Calls of tools over a real engine: a model of random weights, which knows no format, makes valid calls if it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI
from served import PATIENCE, Served, eventually, tiny_model

from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

TINY = ("load=dummy", "infer.kv_memory=4MiB", "infer.max_seq_len=2048", "infer.max_reqs=16", "infer.threads=1")
#: What a template must say so that the parsers of Qwen 3's format know it; it ends where the reasoning begins.
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call> "arguments"
{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}
{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]
BUDGET = {"thinking_token_budget": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    write_tiny_tokenizer(path, TEMPLATE)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served.warm(folder, *TINY) as found:
        yield found
        eventually(lambda: found.stats()["blocks_used"] == 0)
        assert found.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as found:
        yield found


def checked(name: str, arguments: str) -> None:
    """Arguments must be those of their function."""
    value = json.loads(arguments)
    if name == "get_weather":
        jsonschema_rs.validate(SCHEMA, value)
    else:
        assert (name, value) == ("now", {})


def asked(client: OpenAI, **fields: Any) -> Any:
    extra = {**BUDGET, **fields.pop("extra_body", {})}
    settings: Any = {"temperature": 1, "seed": 3, "max_tokens": 900, "extra_body": extra, **fields}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[WEATHER, NOW], **settings)


def test_required_calls_are_valid_in_every_choice(client: OpenAI) -> None:
    answer = asked(client, tool_choice="required", n=4)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert choice.message.tool_calls and choice.message.reasoning, "five bytes of reasoning come before"
        for call in choice.message.tool_calls:
            checked(call.function.name, call.function.arguments)
    assert len({choice.message.tool_calls[0].function.arguments for choice in answer.choices}) > 1


def test_a_stream_of_a_named_call_adds_up_to_the_call_in_one_piece(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    (whole,) = asked(client, tool_choice=choice).choices[0].message.tool_calls
    name, arguments = "", ""
    for chunk in asked(client, tool_choice=choice, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.index == 0
            name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    checked(name, arguments)


def test_without_parallel_calls_there_is_one(client: OpenAI) -> None:
    answer = asked(client, tool_choice="required", parallel_tool_calls=False, n=4)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1] * 4


def test_reasoning_that_is_switched_off_is_not_forced(client: OpenAI) -> None:
    message = asked(client, tool_choice="required", extra_body={"enable_thinking": False}).choices[0].message
    assert message.tool_calls and not getattr(message, "reasoning", None)


def test_a_budget_ends_the_reasoning_of_a_free_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1, seed=1, max_tokens=40,
        extra_body={"thinking_token_budget": 7, "return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    ids = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert bytes(token % 256 for token in ids[:15]).endswith(b"</think>") and len(ids) == 40


def test_responses_and_messages_force_calls_too(client: OpenAI, served: Served) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    answer = client.responses.create(
        model="tiny", input="hello", tools=[tool], tool_choice="required", max_output_tokens=900, extra_body=BUDGET
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and answer.status == "completed"
    for call in calls:
        checked(call.name, call.arguments)
    body = {
        "model": "tiny", "max_tokens": 900, "messages": MESSAGES,
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    }  # fmt: skip
    (block,) = served.http.post("/v1/messages", json=body).raise_for_status().json()["content"]
    checked(block["name"], json.dumps(block["input"]))


def test_the_calls_are_the_same_at_every_depth(folder: Path, client: OpenAI) -> None:
    with Served.warm(folder, *TINY, "infer.depth=1") as other:
        with OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as alone:
            texts = [
                [
                    [call.function.model_dump() for call in choice.message.tool_calls]
                    for choice in asked(each, tool_choice="required", n=2).choices
                ]
                for each in (client, alone)
            ]
        assert other.stop() == 0
    assert texts[0] == texts[1]
