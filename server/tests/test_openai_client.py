"""The official client against the real server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.fixture
def server(make_server: Any) -> Any:
    return make_server(FakeEngine(lambda request: [*b"Hello, world.", 258], cached=4))


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_it_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "evener"


def test_it_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=50, temperature=0.2, top_p=0.9, seed=1, n=2,
        stop=["zzz"],
        logprobs=True, top_logprobs=2, frequency_penalty=0, user="me",
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": False},
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["Hello, world."] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer._request_id


def test_it_streams_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 14


def test_its_stream_helper_puts_a_chat_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=MESSAGES, max_tokens=50) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world."


def test_it_completes_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=20, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello, world."] * 2
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.text_offset is not None
    assert answer.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    chunks = list(client.completions.create(model="fake", prompt="a", max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world."


def test_it_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=MESSAGES, presence_penalty=3)
    assert wrong.value.param == "presence_penalty" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="a" * 500)
    assert long.value.code == "context_length_exceeded"


def test_a_stream_that_it_closes_is_aborted(make_server: Any, eventually: Any) -> None:
    engine = FakeEngine(info_overrides={"max_model_len": 100_000})
    server = make_server(engine)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.completions.create(model="fake", prompt="hello", max_tokens=90_000, stream=True)
        next(iter(stream))
        stream.close()
        eventually(server.idle, "an idle server")


def test_it_calls_tools(make_server: Any, tmp_path: Any) -> None:
    folder = write_tiny_tokenizer(
        tmp_path, "{{ tools }} <tool_call> {% for m in messages %}{{ m.content }}{% endfor %}"
    )
    text = b'<tool_call>{"name": "add", "arguments": {"a": 2, "b": [3]}}</tool_call>'
    engine = FakeEngine(lambda request: [*text, 258], info_overrides={"max_model_len": 1024})
    server = make_server(engine, model=folder)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, tools=tools).choices[0]
        with client.chat.completions.stream(model="fake", messages=MESSAGES, tools=tools) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (answer, streamed):
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 2, "b": [3]}
