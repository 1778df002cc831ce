"""What clients send for other servers: fields without an effect are left out and named; misspelt ones are refused."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from evener_conformance.fake_engine import FakeEngine
from evener_server.batch import BatchBody
from evener_server.generation import Generation
from evener_server.protocol import ChatBody, parse_body
from evener_server.streaming import ChunkEnd
from evener_server.unknown_fields import IGNORED, distance, header

USER = {"role": "user", "content": "hi"}


def ignored(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get("x-ignored-fields", "").split(", ") if name]


@pytest.mark.parametrize("name", [*IGNORED, "top_secret_vendor_field", "request_id", "x"])
def test_a_field_without_an_effect_is_accepted_and_named_in_a_header(name: str, api: Any) -> None:
    assert ignored(api.chat(**{name: "on"})) == [name]
    assert ignored(api.complete(**{name: {"a": 1}})) == [name]


def test_nothing_is_named_when_nothing_was_ignored(api: Any) -> None:
    assert "x-ignored-fields" not in api.chat().headers


def test_unknown_fields_in_messages_and_parts_are_left_out(api: Any) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    plain = api.chat(messages=[USER]).json()["usage"]["prompt_tokens"]
    response = api.chat(messages=[{"role": "user", "content": [part, part][:1], "mood": "good", "annotations": [1]}])
    assert ignored(response) == ["messages[].mood", "messages[].annotations", "messages[].content[].cache_control"]
    assert response.json()["usage"]["prompt_tokens"] == plain


@pytest.mark.parametrize(("detail", "named"), [("high", True), ("low", True), ("original", True), ("auto", False)])
def test_the_detail_of_an_image_changes_nothing_and_is_named(detail: str, named: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,", "detail": detail}}
    message = {"role": "user", "content": [part]}
    for kind, messages in (ChatBody, [message]), (BatchBody, [[USER], [message], [message]]):
        _, ignored = parse_body(kind, {"messages": messages})
        assert ignored == ["messages[].content[].image_url.detail"] * named


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("top_pp", "top_p"), ("seeds", "seed"),
     ("logit_biass", "logit_bias"), ("frequencypenalty", "frequency_penalty"), ("steam", "stream")],
)  # fmt: skip
def test_a_field_within_two_letters_of_a_sampling_parameter_is_a_400_that_suggests_it(
    name: str, meant: str, api: Any, error: Any
) -> None:
    for response in (api.chat(**{name: 1}), api.complete(**{name: 1})):
        assert response.status_code == 400
        assert error(response)["param"] == name and f"did you mean {meant!r}?" in error(response)["message"]


@pytest.mark.parametrize(
    ("one", "other", "edits"), [("", "abc", 3), ("seed", "sed", 1), ("ab", "ba", 2), ("x", "x", 0)]
)
def test_the_distance_counts_letters_added_left_out_and_changed(one: str, other: str, edits: int) -> None:
    assert distance(one, other) == distance(other, one) == edits


def test_a_hostile_name_cannot_break_the_header(api: Any) -> None:
    names = ignored(api.chat(**{"a\r\nSet-Cookie: x=1": 1, "é" * 500: 2, "": 3}))
    assert names == ["a??Set-Cookie??x?1".replace("-", "-"), "?" * 40]
    assert len(header(f"field{i}" for i in range(1000))) < 1000


def test_a_hundred_names_are_counted(api: Any) -> None:
    found = api.chat(**{f"vendor_field_{i}": i for i in range(100)}).headers["x-ignored-fields"]
    assert found.endswith(", and 84 more")


def test_a_custom_role_reaches_the_template(api: Any) -> None:
    assert api.chat(messages=[{"role": "critic", "content": "hi"}]).status_code == 200


def test_an_agents_history_with_calls_and_null_content_is_accepted(api: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"}, {"role": "assistant", "content": None}, USER,
    ]  # fmt: skip
    assert api.chat(messages=history).status_code == 200


def test_both_maxima_may_be_sent_and_the_newer_name_wins(api: Any) -> None:
    answer = api.chat(max_tokens=9, max_completion_tokens=3).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_without_a_model_the_one_that_is_served_answers(api: Any) -> None:
    assert api.chat(model=None).json()["model"] == api.complete(model=...).json()["model"] == "fake"


@pytest.mark.parametrize("stop", ["", [""], []])
def test_an_empty_stop_string_stops_nothing(stop: Any, api: Any) -> None:
    assert api.complete(stop=stop, max_tokens=4).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_every_chunk_has_the_usage_so_far_if_it_is_asked_for(path: str, api: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = getattr(api, path)(stream=True, max_tokens=4, stream_options=options)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4
    # The first chunk of a chat has the role and no token.
    assert (counts[0] == 0) == (path == "chat")
    totals = [chunk["usage"]["total_tokens"] - chunk["usage"]["prompt_tokens"] for chunk in chunks]
    assert totals == counts
    quiet = getattr(api, path)(stream=True, max_tokens=4, stream_options={"continuous_usage_stats": True})
    assert '"usage"' not in quiet.text


def test_the_reason_of_a_4xx_and_what_was_ignored_are_in_the_log(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="evener_server.access")
    api.chat(top_p=2)
    api.chat(store=True)
    api.get("/nowhere")
    lines = [record.getMessage() for record in caplog.records if record.name == "evener_server.access"]
    assert "status=400" in lines[0] and "top_p is 2" in lines[0] and "code=invalid_value" in lines[0]
    assert "ignored=store" in lines[1]
    assert "status=404" in lines[2] and "unknown URL" in lines[2]


def test_the_usage_of_a_chunk_is_that_of_the_moment_it_is_sent() -> None:
    class Growing:
        tokens = 0

        def usage(self) -> dict[str, int]:
            self.tokens += 1
            return {"completion_tokens": self.tokens}

    end = ChunkEnd(cast("Generation", Growing()), include_usage=True, continuous=True)
    assert [end(), end()] == [b',"usage":{"completion_tokens":%d}}\n\n' % n for n in (1, 2)]


def test_a_model_card_has_its_root(make_api: Any) -> None:
    api = make_api(FakeEngine(info_overrides={"model": "/models/fake"}))
    card = api.get("/v1/models").json()["data"][0]
    assert (card["root"], card["parent"]) == ("/models/fake", None)


def test_the_description_lists_the_error_answers(api: Any) -> None:
    document = api.get("/openapi.json").json()
    assert "404" in document["paths"]["/v1/models/{model}"]["get"]["responses"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        answers = document["paths"][path]["post"]["responses"]
        assert {"400", "404", "408", "413", "415", "429", "500", "503", "504"} <= answers.keys()
        assert answers["429"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert document["components"]["schemas"]["Error"]["required"] == ["error"]
