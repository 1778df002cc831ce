"""OpenAI's Responses API: items in, items and events out, and answers that a request goes on from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from evener.errors import RequestError
from evener.frontend.tokenizer import Tokenizer
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer
from evener_server.errors import ApiError
from evener_server.protocol import ChatBody
from evener_server.responses.event_log import EventLog
from evener_server.responses.references import References, item_id
from evener_server.responses.store import ResponseStore

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ALL = f"<think>\nI look.</think>\n\nLet me see.\n{CALL}\n{CALL}"


def respond(api: Any, **fields: Any) -> httpx.Response:
    response: httpx.Response = api.post("/v1/responses", {"input": "hi", **fields})
    return response


def answer(api: Any, **fields: Any) -> dict[str, Any]:
    response = respond(api, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Response.model_validate(body)
    return body


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be one of the API's."""
    assert response.status_code == 200, response.text
    found = []
    for text in response.text.split("\n\n")[:-1]:
        name, _, data = text.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        TypeAdapter(ResponseStreamEvent).validate_python(found[-1])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def prompt(api: Any, request: int = -1) -> str:
    """What the model read."""
    return str(api.llm.tokenizer.decode(api.engine.sent[request].prompt, skip_special_tokens=False))


def test_a_text_is_answered_with_one_message(says: Callable[..., Any]) -> None:
    body = answer(says("Hello.", cached=2), instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50)
    assert body["status"] == "completed" and body["incomplete_details"] is None and body["id"].startswith("resp_")
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
    assert body["metadata"] == {"a": "b"} and body["max_output_tokens"] == 50 and body["instructions"] == "Be brief."
    assert body["usage"]["output_tokens"] == 7 and body["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 7


def test_reasoning_text_and_calls_are_items_of_their_own(says: Callable[..., Any]) -> None:
    body = answer(says(ALL), tools=[WEATHER])
    reasoning, message, *calls = body["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"] == [{"type": "reasoning_text", "text": "I look."}]
    assert reasoning["summary"] == [] and message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("function_call", "get_weather", {"city": "Paris"})
    ] * 2
    assert len({call["call_id"] for call in calls}) == len({call["id"] for call in calls}) == 2
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("I look.")
    assert body["tools"] == [{**WEATHER, "strict": None}]


def test_the_events_of_a_stream_add_up_to_the_whole(says: Callable[..., Any]) -> None:
    api = says(ALL)
    found = events(respond(api, tools=[WEATHER], stream=True))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1]["response"]
    assert found[-1]["type"] == "response.completed" and last["status"] == "completed"
    grown: dict[int, str] = {}
    for event in found:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(grown) and event["item"]["status"] == "in_progress"
            grown[event["output_index"]] = event["item"].get("arguments", "")
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == last["output"][event["output_index"]]["id"]
            grown[event["output_index"]] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"] == last["output"][event["output_index"]]
    assert [item.get("arguments") or item["content"][0]["text"] for item in last["output"]] == list(grown.values())
    kinds = [event["type"] for event in found]
    for opened in ("output_item", "content_part"):
        assert kinds.count(f"response.{opened}.added") == kinds.count(f"response.{opened}.done")
    whole = answer(api, tools=[WEATHER])
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in last["output"]]
    assert last["usage"] == whole["usage"]
    # OpenAI's document has no null for them.
    assert not {"usage", "user"} & found[0]["response"].keys() and "user" not in whole
    assert answer(api, user="me")["user"] == "me"


def test_items_of_every_kind_reach_the_template(says: Callable[..., Any]) -> None:
    api = says("Sunny.")
    answer(api, instructions="Help.", tools=[WEATHER], input=[
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ])  # fmt: skip
    read = prompt(api)
    assert "<|im_start|>system\nHelp.<|im_end|>" in read and "The weather of a city." in read
    assert read.count("<|im_start|>assistant") == 2, "one for the earlier turn, one for the answer"
    turn = "<|im_start|>assistant\nI look." + "".join(
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
        for city in ("Rome", "Bonn")
    )
    assert turn in read and "<|im_start|>tool\nsunny" in read and "<|im_start|>tool\nrain" in read


def test_a_request_goes_on_from_an_earlier_answer(says: Callable[..., Any]) -> None:
    api = says("Hello, Ada.")
    first = answer(api, input="I am Ada.", instructions="Be kind.")
    second = answer(api, input="Who am I?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    read = prompt(api)
    assert "I am Ada." in read and "<|im_start|>assistant\nHello, Ada.<|im_end|>" in read and "Who am I?" in read
    assert "Be kind." not in read, "instructions do not go on"
    third = answer(api, input="And now?", previous_response_id=second["id"])
    assert prompt(api).count("Hello, Ada.") == 2
    # A streamed answer is kept too, and an earlier one can be gone on from again.
    streamed = events(respond(api, input="x", previous_response_id=first["id"], stream=True))[-1]["response"]
    answer(api, previous_response_id=streamed["id"])
    assert third["id"] not in prompt(api)


def test_answers_are_read_and_deleted_by_their_id(says: Callable[..., Any], error: Callable[..., Any]) -> None:
    api = says("Hello.")
    body = answer(api)
    assert api.get(f"/v1/responses/{body['id']}").json() == body
    assert api.request("DELETE", f"/v1/responses/{body['id']}").json()["deleted"] is True
    unkept = answer(api, store=False)
    for name in (body["id"], unkept["id"], "resp_x"):
        gone = api.get(f"/v1/responses/{name}")
        assert gone.status_code == 404 and "not found" in error(gone)["message"]
        refused = respond(api, previous_response_id=name)
        assert refused.status_code == 400 and error(refused)["code"] == "previous_response_not_found"


def test_the_store_keeps_so_many_answers_and_so_many_bytes() -> None:
    store = ResponseStore(most=2, most_bytes=1000)
    for name in "abc":
        store.add(name, name.encode() * 10, [])
    assert store.response("c") == b"c" * 10 and store.messages("b") == []
    with pytest.raises(ApiError, match="keeps the last 2 responses"):
        store.response("a")
    store.add("d", b"d" * 980, [])
    assert store.response("d"), "the others went"
    store.add("e", b"e" * 2000, [])
    for name in "be":
        with pytest.raises(ApiError, match="not found"):
            store.response(name)
    assert store.response("d"), "an answer that is too long takes no other's place"
    store.replace("d", b"d" * 2000)
    with pytest.raises(ApiError, match="not found"):
        store.response("d")
    store.add("f", b"f" * 990, [])
    assert store.response("f"), "its bytes are free again"


def test_an_answer_at_its_limit_is_incomplete(says: Callable[..., Any]) -> None:
    api = says(CALL)
    body = answer(api, tools=[WEATHER], max_output_tokens=58)
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    found = events(respond(api, tools=[WEATHER], max_output_tokens=58, stream=True))
    assert found[-1]["type"] == "response.incomplete"
    # A call that was cut off is no part of the conversation.
    answer(api, previous_response_id=body["id"])


def test_log_probabilities_come_with_the_text(says: Callable[..., Any]) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    api = says("<think>\nno</think>\n\nHello.")
    part = answer(api, **fields)["output"][-1]["content"][0]
    text = "".join(each["token"] for each in part["logprobs"])
    assert text == "Hello." and len(part["logprobs"][0]["top_logprobs"]) == 2
    found = events(respond(api, stream=True, **fields))
    streamed = [each for event in found if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert "".join(each["token"] for each in streamed) == "Hello."


def test_tools_that_run_on_openais_servers_are_left_out_and_named(says: Callable[..., Any]) -> None:
    response = respond(
        says("Hi."), tools=[{"type": "web_search"}, WEATHER, {"type": "custom", "name": "x"}], service_tier="auto",
        prompt_cache_key="k", include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
    )  # fmt: skip
    assert response.status_code == 200, response.text
    named = response.headers["x-ignored-fields"].split(", ")
    assert set(named) == {
        "tools[0]", "tools[2]", "service_tier", "prompt_cache_key", "include[0]", "reasoning.summary",
    }  # fmt: skip
    assert [tool["type"] for tool in response.json()["tools"]] == ["function"]
    only = respond(says("Hi."), tools=[{"type": "web_search"}], tool_choice="required")
    assert only.status_code == 200, "nothing is left to choose from"


def test_the_verbosity_and_the_detail_of_images_change_nothing_and_are_named(says: Callable[..., Any]) -> None:
    response = respond(says("Hi."), text={"verbosity": "low"}, include=["message.output_text.logprobs"])
    assert response.headers["x-ignored-fields"] == "text.verbosity"
    assert "x-ignored-fields" not in respond(says("Hi."), text={"format": {"type": "text"}}).headers


def test_a_subset_of_the_tools_is_allowed(says: Callable[..., Any], error: Callable[..., Any]) -> None:
    other = {**WEATHER, "name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    api = says(CALL)
    body = answer(api, tools=[WEATHER, other], tool_choice=choice)
    assert [item["name"] for item in body["output"]] == ["get_weather"] and body["tool_choice"] == choice
    grammar = api.engine.sent[-1].sampling.grammar
    assert grammar is not None and "get_weather" in str(grammar) and "get_time" not in str(grammar)
    for wrong in {"tools": [{"type": "web_search"}]}, {"tools": "x"}, {"mode": "never"}, {"mode": []}, {"tools": []}:
        found = error(respond(api, tools=[WEATHER, other], tool_choice={**choice, **wrong}))
        assert found["param"] == "tool_choice", wrong
        # As this API spells it, which is not how a chat completion does.
        assert '"mode": "auto" or "required", "tools"' in found["message"]
        assert '"allowed_tools": {' not in found["message"]


@pytest.mark.parametrize("limit", [{"max_output_tokens": 100}, {}])
def test_the_oldest_turns_of_a_conversation_that_is_too_long_are_left_out(
    says: Callable[..., Any], error: Callable[..., Any], limit: dict[str, int]
) -> None:
    api = says("Hi.")  # its context has 4,096 tokens, and each letter is one
    turns = [
        item for number in range(12)
        for item in (
            {"role": "user", "content": f"question {number} " + "x" * 400},
            {"type": "function_call", "call_id": f"c{number}", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"},
        )
    ]  # fmt: skip
    asked = {"input": turns, "instructions": "Be brief.", "tools": [WEATHER], **limit}
    assert "context" in error(respond(api, **asked))["message"]
    body = answer(api, truncation="auto", **asked)
    assert body["truncation"] == "auto" and body["status"] == "completed"
    read = prompt(api)
    kept = [number for number in range(12) if f"question {number} " in read]
    assert kept == list(range(kept[0], 12)) and kept[0] > 0
    # Whole turns, with what goes with every turn; one more would not fit.
    assert [number for number in range(12) if f"result {number}<" in read] == kept and "Be brief." in read
    room = 4096 - limit.get("max_output_tokens", 1024)
    assert room - 500 < len(api.engine.sent[-1].prompt) <= room


def test_a_conversation_of_very_many_turns_is_neither_copied_nor_made_tokens_as_a_whole_for_each(
    says: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    api, copied, encoded, encode = says("Hi."), list[int](), list[int](), Tokenizer.encode
    copy = ChatBody.model_copy

    def counted(body: ChatBody, **more: Any) -> ChatBody:
        copied.append(len(more["update"]["messages"]))
        return copy(body, **more)

    def measured(tokenizer: Tokenizer, text: Any, *more: Any, **named: Any) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, *more, **named)

    monkeypatch.setattr(ChatBody, "model_copy", counted)
    monkeypatch.setattr(Tokenizer, "encode", measured)
    turns = [{"role": "user", "content": f"question {number} " + "x" * 100} for number in range(1000)]
    answer(api, input=turns, truncation="auto")
    assert "question 999" in prompt(api) and "question 0 " not in prompt(api)
    assert len(copied) < 15  # of 1,000 turns: halving asks ten times
    assert max(encoded) < 20_000 < len(json.dumps(turns))


def test_a_conversation_that_fits_loses_nothing_and_one_long_turn_is_refused(
    says: Callable[..., Any], error: Callable[..., Any]
) -> None:
    api = says("Hi.")
    said = (("user", "first"), ("assistant", "b"), ("user", "c"))
    two = [{"role": role, "content": text} for role, text in said]
    answer(api, input=two, truncation="auto")
    assert "first" in prompt(api)
    long = [*two, {"role": "user", "content": "x" * 5000}]
    assert "context" in error(respond(api, input=long, truncation="auto"))["message"]


def test_items_of_kept_answers_can_be_named_instead_of_sent(says: Callable[..., Any]) -> None:
    api = says(ALL)
    first = answer(api, tools=[WEATHER], input="What is the weather?")
    names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
               for item in first["output"] if item["type"] == "function_call"]  # fmt: skip
    user = {"role": "user", "content": "What is the weather?"}
    assert len(set(map(str, names))) == 4 and len(results) == 2
    answer(api, tools=[WEATHER], input=[user, *first["output"], *results])
    sent = prompt(api)
    answer(api, tools=[WEATHER], input=[user, *names, *results])
    assert prompt(api) == sent and "Let me see." in sent


def test_a_named_item_must_be_kept_and_is_named_once(says: Callable[..., Any], error: Callable[..., Any]) -> None:
    api = says("Hi.")
    (kept,), (lost,) = answer(api)["output"], answer(api, store=False)["output"]

    def name(*ids: Any) -> httpx.Response:
        return respond(api, input=[{"type": "item_reference", "id": each} for each in ids])

    for unknown in (lost["id"], "msg_1", "", None, [], "msg_" + "0" * 36):
        response = name(unknown)
        assert response.status_code == 404 and error(response)["param"] == "input[0].id", unknown
    assert error(name(kept["id"], kept["id"]))["param"] == "input[1].id"
    assert error(name(kept["id"][:-1] + "9"))["param"] == "input[0].id"


def test_named_items_are_read_up_to_the_size_of_a_request() -> None:
    store = ResponseStore()
    for digit in "abc":
        name = digit * 32
        item = {"id": item_id("msg", name, 0), "text": "x" * 500}
        store.add(f"resp_{name}", json.dumps({"output": [item]}).encode(), [])
    references = References(store, 1500)
    assert [references.take(item_id("msg", digit * 32, 0), "")["text"] for digit in "ab"] == ["x" * 500] * 2
    with pytest.raises(RequestError, match="too long together"):
        references.take(item_id("msg", "c" * 32, 0), "input[2]")


def test_the_tokens_of_a_request_are_counted_before_it_is_sent(
    says: Callable[..., Any], error: Callable[..., Any]
) -> None:
    api = says("Hi.")
    asked = {"input": "What is the weather?", "instructions": "Be brief.", "tools": [WEATHER]}
    found = api.post("/v1/responses/input_tokens", asked).json()
    assert found == {"object": "response.input_tokens", "input_tokens": answer(api, **asked)["usage"]["input_tokens"]}
    assert error(api.post("/v1/responses/input_tokens", {"input": [5]}))["param"] == "input[0]"
    assert error(api.post("/v1/responses/input_tokens", {"input": "x" * 100_000}))["param"] == "input"


def test_a_kept_response_is_not_streamed_again(says: Callable[..., Any], error: Callable[..., Any]) -> None:
    api = says("Hi.")
    place = f"/v1/responses/{answer(api)['id']}"
    assert error(api.get(f"{place}?stream=true"))["param"] == "stream"
    assert api.get(f"{place}?stream=false").status_code == 200


def test_a_response_in_the_background_is_read_later(says: Callable[..., Any], eventually: Any) -> None:
    api = says(ALL)
    queued = answer(api, background=True, tools=[WEATHER])
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])

    def state() -> Any:
        body = api.get(f"/v1/responses/{queued['id']}").json()
        Response.model_validate(body)
        return body

    eventually(lambda: state()["status"] == "completed")
    assert [item["type"] for item in state()["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert api.post(f"/v1/responses/{queued['id']}/cancel", {}).json()["status"] == "completed", "it has ended"
    answer(api, previous_response_id=queued["id"])
    assert "Let me see." in prompt(api)


def test_a_stream_in_the_background_is_read_again_from_any_event(
    says: Callable[..., Any], error: Callable[..., Any]
) -> None:
    api = says(ALL)
    seen = events(respond(api, background=True, stream=True, tools=[WEATHER], enable_response_messages=True))
    assert [each["type"] for each in seen[:2]] == ["response.created", "response.in_progress"]
    assert seen[-1]["type"] == "response.completed" and seen[-1]["response"]["background"]
    assert seen[0]["response"]["input_messages"] == seen[-1]["response"]["input_messages"]
    place = f"/v1/responses/{seen[0]['response']['id']}"
    assert api.get(place).json()["output"] == seen[-1]["response"]["output"]
    assert events(api.get(f"{place}?stream=true")) == seen
    assert events_of(api.get(f"{place}?stream=true&starting_after=5")) == seen[6:]
    assert events_of(api.get(f"{place}?stream=true&starting_after={len(seen)}")) == []
    assert error(api.get(f"{place}?stream=true&starting_after=x"))["param"] == "starting_after"
    assert api.request("DELETE", place).status_code == 200 and api.get(f"{place}?stream=true").status_code == 404


def test_a_stream_that_fails_in_the_background_ends_with_the_error(says: Callable[..., Any]) -> None:
    (failed,) = events(respond(says("Hello."), background=True, stream=True, input="x" * 100_000))
    assert failed["type"] == "error" and "context" in failed["message"]


async def test_a_reader_gets_the_events_of_a_response_that_is_still_generated() -> None:
    log = EventLog()
    log.add(b"event: a\ndata: 0\n\nevent: b\ndata: 1\n\n")
    late, all_events = log.after(0), log.after(-1)
    assert await anext(late) == b"event: b\ndata: 1\n\n" and await anext(all_events) == log.whole()
    waiting = asyncio.ensure_future(anext(late))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.add(b"event: c\ndata: 2\n\n")
    assert await waiting == await anext(all_events) == b"event: c\ndata: 2\n\n"
    log.end()
    assert [each async for each in late] == [each async for each in log.after(2)] == []


def test_a_response_in_the_background_can_be_cancelled(says: Callable[..., Any], eventually: Any) -> None:
    api = says("Hello.", hold_after=2)
    queued = answer(api, background=True)
    eventually(lambda: api.get(f"/v1/responses/{queued['id']}").json()["status"] == "in_progress")
    for _ in range(2):
        cancelled = api.post(f"/v1/responses/{queued['id']}/cancel", {})
        assert cancelled.status_code == 200 and cancelled.json()["status"] == "cancelled"
    assert api.get(f"/v1/responses/{queued['id']}").json()["status"] == "cancelled"
    api.engine.release()
    eventually(lambda: not api.engine.open_ids)


def test_only_a_response_in_the_background_is_cancelled(says: Callable[..., Any], error: Any) -> None:
    api = says("Hello.")
    found = api.post(f"/v1/responses/{answer(api)['id']}/cancel", {})
    assert found.status_code == 400 and "synchronous" in error(found)["message"]
    assert api.post("/v1/responses/resp_none/cancel", {}).status_code == 404


def test_a_response_in_the_background_that_fails_says_so(says: Callable[..., Any], eventually: Any) -> None:
    api = says("Hello.")
    queued = answer(api, background=True, input="x" * 100_000)
    eventually(lambda: api.get(f"/v1/responses/{queued['id']}").json()["status"] == "failed")
    assert "context" in api.get(f"/v1/responses/{queued['id']}").json()["error"]["message"]


def test_functions_of_a_namespace_are_called_by_their_own_names(says: Callable[..., Any]) -> None:
    space = {"type": "namespace", "name": "maps", "tools": [{**WEATHER, "strict": True}]}
    api = says(CALL.replace("get_weather", "maps__get_weather"))
    body = respond(api, tools=[space]).json()
    (call,) = body["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "get_weather", "maps")
    assert body["tools"] == [space] and '"maps__get_weather"' in prompt(api)
    calls = [event["item"] for event in events_of(respond(api, tools=[space], stream=True)) if "item" in event]
    assert {(each["name"], each["namespace"]) for each in calls} == {("get_weather", "maps")}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": ""}
    respond(api, tools=[space], input=[call, output])
    assert '"name": "maps__get_weather", "arguments": {"city": "Paris"}' in prompt(api)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Without the check of their types: a namespace is newer than the pinned client."""
    return [json.loads(text.partition("\ndata: ")[2]) for text in response.text.split("\n\n")[:-1]]


def test_the_tokens_of_prompt_and_answer_are_shown_to_who_asks(says: Callable[..., Any]) -> None:
    api = says("Hello.")
    body = answer(api, enable_response_messages=True)
    (read,), (written,) = body["input_messages"], body["output_messages"]
    assert read["tokens"] == api.engine.sent[0].prompt and read["message"].startswith("<|im_start|>user")
    assert written["message"] == "Hello.<|im_end|>" and len(written["tokens"]) == 7
    assert "input_messages" not in answer(api)


def test_a_choice_of_a_tool_that_is_left_out_is_left_out_too(says: Callable[..., Any]) -> None:
    api = says("Hello.")
    search, function = {"type": "web_search"}, {"type": "function", "name": "get_weather"}
    for choice, named in (
        (search, "tools[1], tool_choice"),
        ({"type": "allowed_tools", "mode": "required", "tools": [search]}, "tools[1], tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [search, function]}, "tools[1], tool_choice.tools[0]"),
    ):
        found = respond(api, tools=[WEATHER, search], tool_choice=choice)
        assert found.status_code == 200, found.text
        assert found.headers["x-ignored-fields"] == named and "get_weather" in prompt(api)
    assert respond(api, tools=[search], tool_choice=search).status_code == 200
    assert respond(api, tools=[WEATHER], tool_choice=search).status_code == 400, "no such tool was sent"


def test_the_effort_none_switches_reasoning_off(says: Callable[..., Any], tmp_path: Path) -> None:
    template = "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    api = says("Hi.", write_tiny_tokenizer(tmp_path / "switch", template))
    answer(api, reasoning={"effort": "none"})
    assert prompt(api).startswith("False")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "not empty"),
        ({"input": 5}, "input", "list"),
        ({"input": None}, "input", "missing"),
        ({"input": ["x"]}, "input[0]", "object"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"role": "user"}]}, "input[0].content", "string or a list"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "user"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_file"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "string"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "string"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0]", "JSON"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", "list"),
        ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary[0].text", "string"),
        ({"input": "x" * 100_000}, "input", "context"),
        ({"input": "x", "instructions": "x" * 5_000}, "input", "context"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tools": [{"type": "x"}, {"type": "function"}]}, "tools[1].name", "missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "x"}}, "tool_choice", "none"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"background": True, "store": False}, "background", "`store` is true"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"truncation": "left"}, "truncation", "auto"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"temprature": 1}, "temprature", "temperature"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "messages"),
    ],
)
def test_wrong_fields_are_named_as_the_client_sent_them(
    says: Callable[..., Any], error: Callable[..., Any], fields: dict[str, Any], param: str, said: str
) -> None:
    response = respond(says("Hi."), **fields)
    assert response.status_code == 400, response.text
    assert error(response)["param"] == param and said in error(response)["message"]


def test_a_stream_that_fails_ends_with_an_error_event(make_server: Any, http: httpx.Client, tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=3, info_overrides={"max_model_len": 1000})
    server = make_server(engine)
    with http.stream("POST", f"{server.url}/v1/responses", json={"input": "hi", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        engine.die("a test ended it")
        rest = list(lines)
    event = json.loads(rest[-2].removeprefix("data: "))
    assert "event: error" in rest and event["type"] == "error" and "a test ended it" in event["message"]
    assert event["sequence_number"] > 0


def test_openais_client_streams_calls_and_goes_on(make_server: Any, tmp_path: Path) -> None:
    template = "{{ tools }} <tool_call> </think>{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_tiny_tokenizer(tmp_path, template)
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(ALL, add_special_tokens=False).ids
    engine = FakeEngine(lambda request: [*text, 258], info_overrides={"max_model_len": 1024})
    server = make_server(engine, model=folder)
    tools: Any = [WEATHER]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model="fake", input="Hi.", tools=tools) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert response.output_text == "Let me see."
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}] * 2
        outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
        # Both ways to go on: by the id, and with all items sent back.
        client.responses.create(model="fake", input=outputs, previous_response_id=response.id)
        items: Any = [{"role": "user", "content": "Hi."}, *response.output, *outputs]
        again = client.responses.create(model="fake", input=items, tools=tools)
        assert client.responses.retrieve(again.id).output_text == "Let me see."
        assert again.usage and response.usage and again.usage.input_tokens > response.usage.input_tokens
