"""Anthropic's Messages API: blocks in, blocks and events out, and counts of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx
import pytest

from evener.config.resolve import ResolvedValue
from evener_conformance.fake_engine import FakeEngine
from evener_server.options import ServerOptions

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ALL = f"<think>\nI look.</think>\n\nLet me see.\n{CALL}\n{CALL}"
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def send(api: Any, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], **fields}
    response: httpx.Response = api.post("/v1/messages", {k: v for k, v in body.items() if v is not ...})
    return response


def message(api: Any, **fields: Any) -> dict[str, Any]:
    response = send(api, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake")
    return body


def _user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found = []
    for text in response.text.split("\n\n")[:-1]:
        name, _, data = text.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt(api: Any) -> str:
    return str(api.llm.tokenizer.decode(api.engine.sent[-1].prompt, skip_special_tokens=False))


def test_the_usage_counts_what_a_request_put_into_the_prefix_cache(make_api: Callable[..., Any]) -> None:
    config = {"infer.block_size": ResolvedValue(4, ""), "infer.prefix_cache": ResolvedValue(True, "")}
    api = make_api(FakeEngine(info_overrides={"config": config}, cached=4))
    usage = message(api, max_tokens=3)["usage"]
    length = len(api.engine.sent[-1].prompt)
    expected = {"cache_read_input_tokens": 4, "cache_creation_input_tokens": length // 4 * 4 - 4}
    counts = {**expected, "input_tokens": length % 4, "output_tokens": 3}
    assert {name: usage[name] for name in counts} == counts
    first, *_, last, _ = events(send(api, max_tokens=3, stream=True))
    assert first["message"]["usage"]["input_tokens"] == length and last["usage"] == usage
    config["infer.prefix_cache"] = ResolvedValue(False, "")
    usage = message(make_api(FakeEngine(info_overrides={"config": config})), max_tokens=3)["usage"]
    assert (usage["cache_creation_input_tokens"], usage["input_tokens"]) == (0, length)


def test_a_message_is_answered(says: Callable[..., Any]) -> None:
    api = says("Hello.", cached=2)
    body = message(api, system="Be brief.")
    assert body["content"] == [{"type": "text", "text": "Hello.", "citations": []}] and body["id"].startswith("msg_")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    assert usage["output_tokens"] == 7 and usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] + 2 == len(api.engine.sent[-1].prompt)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt(api)


def test_thinking_text_and_calls_are_blocks(says: Callable[..., Any]) -> None:
    body = message(says(ALL), tools=[WEATHER], **THINKING)
    thinking, text, *calls = body["content"]
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": len("I look.")}
    assert thinking == {"type": "thinking", "thinking": "I look.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see.", "citations": []} and body["stop_reason"] == "tool_use"
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Paris"})
    ] * 2
    assert calls[0]["id"] != calls[1]["id"]


def test_thinking_is_given_out_only_if_it_was_asked_for(says: Callable[..., Any]) -> None:
    api = says("<think>\nhm</think>\n\nYes.")
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        assert message(api, **fields)["content"] == [{"type": "text", "text": "Yes.", "citations": []}]
    assert [block["type"] for block in message(api, thinking={"type": "adaptive"})["content"]] == ["thinking", "text"]


def test_the_events_of_a_stream_add_up_to_the_whole(says: Callable[..., Any]) -> None:
    api = says(ALL)
    found = events(send(api, tools=[WEATHER], stream=True, **THINKING))
    first = found[0]["message"]
    assert found[0]["type"] == "message_start" and first["content"] == [] and first["usage"]["output_tokens"] == 0
    blocks: list[dict[str, Any]] = []
    text, open_block = "", False
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert not open_block and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            text, open_block = "", True
        elif event["type"] == "content_block_delta":
            assert open_block and event["index"] == len(blocks) - 1
            kind = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[blocks[-1]["type"]]
            assert event["delta"]["type"] == {"partial_json": "input_json"}.get(kind, kind) + "_delta"
            text += event["delta"][kind]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            blocks[-1]["input" if kind == "partial_json" else kind] = (
                json.loads(text) if kind == "partial_json" else text
            )
            open_block = False
    whole = message(api, tools=[WEATHER], **THINKING)
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"]
    assert found[-2]["type"] == "message_delta" and found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"] == whole["usage"] and found[-1] == {"type": "message_stop"}


def test_blocks_of_every_kind_reach_the_template(says: Callable[..., Any]) -> None:
    api = says("Sunny.")
    cached = {"cache_control": {"type": "ephemeral"}}
    message(api, tools=[WEATHER], system=[{"type": "text", "text": "Help.", **cached}], messages=[
        {"role": "user", "content": [{"type": "text", "text": "Weather?", **cached}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "Well?"}]},
    ])  # fmt: skip
    read = prompt(api)
    assert "<|im_start|>system\nHelp.<|im_end|>" in read and "The weather of a city." in read
    calls = "".join(
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
        for city in ("Rome", "Bonn")
    )
    results = "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nWell?<|im_end|>"
    assert f"<|im_start|>assistant\nI look.{calls}<|im_end|>" in read and results in read


def test_documents_and_results_of_searches_are_read_as_texts(says: Callable[..., Any]) -> None:
    api = says("Hi.")
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}, "title": "A",
             "context": "of b", "citations": {"enabled": True}, "cache_control": {"type": "ephemeral"}}  # fmt: skip
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}}
    texts = [{"type": "text", "text": "three"}]
    found = {"type": "search_result", "source": "http://c", "title": "C", "content": texts}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found]}
    call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
    message(api, messages=[{"role": "user", "content": [plain]}, {"role": "assistant", "content": [call]},
                           {"role": "user", "content": [result, parts]}])  # fmt: skip
    read = prompt(api)
    assert all(f"{text}<|im_end|>" in read for text in ("A\nof b\none", "C\nhttp://c\nthree", "two"))


def test_citations_that_are_asked_for_are_named_as_ignored(says: Callable[..., Any]) -> None:
    api = says("Hi.")
    texts = [{"type": "text", "text": "three", "citations": []}]
    found = {"type": "search_result", "source": "c", "title": "C", "content": texts, "citations": {"enabled": True}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found]}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {**document, "citations": {"enabled": True}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [result, {**document, "citations": {"enabled": False}}]},
    ]
    answer = api.post("/v1/messages", {"max_tokens": 5, "messages": said})
    named = "messages[0].content[1].citations, messages[2].content[0].citations"
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == named
    plain = api.post("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [document]}]})
    assert "x-ignored-fields" not in plain.headers


def test_why_a_message_ended(says: Callable[..., Any]) -> None:
    api = says("One, two, three.")
    assert message(api, max_tokens=3)["stop_reason"] == "max_tokens"
    body = message(api, stop_sequences=["x", ", th"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", ", th")
    assert body["content"] == [{"type": "text", "text": "One, two", "citations": []}]


def test_a_call_that_was_cut_off_keeps_its_text(says: Callable[..., Any]) -> None:
    body = message(says(CALL), tools=[WEATHER], max_tokens=58)
    (block,) = body["content"]
    assert body["stop_reason"] == "max_tokens"
    assert block["input"]["INVALID_JSON"] and '{"city": "Paris"}'.startswith(block["input"]["INVALID_JSON"])


def test_a_choice_of_tools_is_the_chats(says: Callable[..., Any]) -> None:
    api = says(ALL)
    assert message(api, tools=[WEATHER], tool_choice={"type": "none"})["stop_reason"] == "end_turn"
    one = message(api, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    assert message(api, tool_choice={"type": "any"})["stop_reason"] == "end_turn", "there are no tools to choose from"


def test_tokens_are_counted_as_the_model_reads_them(says: Callable[..., Any]) -> None:
    api = says("Hello.")
    fields: dict[str, Any] = {
        "system": "Be brief.", "tools": [WEATHER], "messages": [{"role": "user", "content": "Weather?"}]
    }  # fmt: skip
    counted = api.post("/v1/messages/count_tokens", {"model": "fake", **fields})
    assert counted.status_code == 200, counted.text
    assert counted.json() == {"input_tokens": message(api, **fields)["usage"]["input_tokens"]}
    assert not [each for each in api.engine.sent[:-1] if hasattr(each, "prompt")], "counting generates nothing"
    wrong = api.post("/v1/messages/count_tokens", {"model": "fake", "messages": []})
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"


def test_tools_that_run_on_anthropics_servers_are_left_out_and_named(says: Callable[..., Any]) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {**WEATHER, "type": "custom", "strict": True}]
    response = send(says("Hi."), tools=tools, metadata={"user_id": "u"}, service_tier="auto", **THINKING)
    assert response.status_code == 200, response.text
    assert set(response.headers["x-ignored-fields"].split(", ")) == {"tools[0]", "service_tier"}


def test_a_budget_of_thinking_is_kept_by_models_that_think_and_named_for_others(
    says: Callable[..., Any], make_api: Any
) -> None:
    api = says("<think>hm</think>Yes.")
    assert "x-ignored-fields" not in send(api, **THINKING).headers
    assert json.loads(api.engine.sent[0].sampling.grammar.text)["reasoning"]["budget"] == 1024
    other = make_api()
    assert send(other, **THINKING, max_tokens=8).headers["x-ignored-fields"] == "thinking.budget_tokens"
    assert other.engine.sent[0].sampling.grammar is None


def test_a_forced_tool_is_a_grammar(says: Callable[..., Any]) -> None:
    api = says(CALL)
    (block,) = message(api, tools=[WEATHER], tool_choice={"type": "any"})["content"]
    assert block["type"] == "tool_use"
    tags = json.loads(api.engine.sent[0].sampling.grammar.text)["format"]["elements"][1]
    assert tags["at_least_one"] and not tags["stop_after_first"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": ...}, "max_tokens is missing"),
        ({"messages": ...}, "messages is missing"),
        ({"messages": ["x"]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content must be"),
        (_user({"type": "container_upload"}), "messages[0].content[0].type"),
        (_user({"type": []}), "messages[0].content[0].type"),
        (_user({"type": "document"}), "messages[0].content[0].source.type"),
        (_user({"type": "document", "source": {"type": "base64", "data": "x"}}), "messages[0].content[0].source.type"),
        (_user({"type": "document", "source": {"type": "text"}}), "messages[0].content[0].source.data"),
        (_user({"type": "document", "source": {"type": "text", "data": "x"}, "title": 5}), "content[0].title"),
        (_user({"type": "search_result", "content": [{"type": "document"}]}), "content[0].content[0].type"),
        ({"system": [{"type": "document", "source": {"type": "text", "data": "x"}}]}, "system[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source.type must be"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]}, "input must be"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "context"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name is 'a b'"),
        ({"tools": [{**WEATHER, "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format"),
        ({"temprature": 1}, "temperature"),
    ],
)
def test_errors_have_anthropics_form(says: Callable[..., Any], fields: dict[str, Any], said: str) -> None:
    response = send(says("Hi."), **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]


def test_another_model_is_not_found(says: Callable[..., Any]) -> None:
    response = send(says("Hi."), model="other")
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_a_stream_that_fails_ends_with_an_error_event(make_server: Any, http: httpx.Client) -> None:
    engine = FakeEngine(hold_after=3, info_overrides={"max_model_len": 1000})
    server = make_server(engine)
    body = {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with http.stream("POST", f"{server.url}/v1/messages", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
        engine.die("a test ended it")
        rest = list(lines)
    event = json.loads(rest[-2].removeprefix("data: "))
    assert "event: error" in rest and event["type"] == "error" and "a test ended it" in event["error"]["message"]


def test_models_are_listed_with_the_fields_of_both_vendors(make_api: Any) -> None:
    api = make_api(options=ServerOptions(model_aliases="other"))
    found = api.get("/v1/models").json()
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("fake", "other", False)
    for card in found["data"]:
        assert (card["object"], card["type"]) == ("model", "model") and card["display_name"] == card["id"]
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
        assert card["max_input_tokens"] == card["max_model_len"]
        assert api.get(f"/v1/models/{card['id']}").json() == card
