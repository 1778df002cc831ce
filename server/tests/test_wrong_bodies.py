"""Everything wrong with a body is a 4xx that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener_server.body import BodyLimits
from evener_server.protocol import ChatBody, CompletionBody

USER = {"role": "user", "content": "hi"}


def _messages(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "messages|prompt"),
    ({"max_tokens": 1000}, "messages|prompt"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": []}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.0e0 + 0.5}, "n"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_with_eos": "yes"}, "stop_with_eos"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"ignore_eos": True, "stop_with_eos": True}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"user": 5}, "user"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1.1}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(513)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"max_tokens": ..., "min_tokens": 500}, "min_tokens"),
    ({"max_time": 0}, "max_time"),
    ({"max_time": "1s"}, "max_time"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"temprature": 1}, "temprature"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    (_messages("hi"), "messages[0]"),
    (_messages({"content": "hi"}), "messages[0].role"),
    (_messages({"role": ["user"], "content": "hi"}), "messages[0].role"),
    (_messages({"role": "", "content": "hi"}), "messages[0].role"),
    (_messages({"role": "r" * 65, "content": "hi"}), "messages[0].role"),
    (_messages({"role": "user"}), "messages[0].content"),
    (_messages({"role": "user", "content": None}), "messages[0].content"),
    (_messages(USER, {"role": "user", "content": 5}), "messages[1].content"),
    (_messages({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text"),
    (_messages({"role": "user", "content": ["hi"]}), "messages[0].content[0]"),
    (
        _messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        "messages[0].content[0].type",
    ),
    (_messages({**USER, "name": 5}), "messages[0].name"),
    (_messages({"role": "assistant", "audio": {"id": "x"}}), "messages[0].audio"),
    (_messages({"role": "assistant", "tool_calls": [{"id": "1"}]}), "messages[0].tool_calls[0].function"),
    (
        _messages(
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            }
        ),
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"max_tokens": ..., "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"best_of": 2}, "best_of"),
    ({"echo": "x"}, "echo"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ...}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [100000]}, "prompt"),
    ({"prompt": [10**40]}, "prompt"),
    ({"prompt": ["ok", ""]}, "prompt"),
    ({"prompt": "a" * 500}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]


def _name(value: object) -> str:
    return str(value)[:60]


@pytest.mark.parametrize(("fields", "param"), BOTH + CHAT, ids=_name)
def test_a_wrong_chat_is_a_400_that_names_the_field(api: Any, error: Any, fields: dict[str, Any], param: str) -> None:
    response = api.chat(**fields)
    assert response.status_code == 400, response.text
    assert error(response)["param"] in param.split("|"), response.text
    assert error(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param"), BOTH + COMPLETION, ids=_name)
def test_a_wrong_completion_is_a_400_that_names_the_field(
    api: Any, error: Any, fields: dict[str, Any], param: str
) -> None:
    response = api.complete(**fields)
    assert response.status_code == 400, response.text
    assert error(response)["param"] in param.split("|"), response.text
    assert api.llm.num_open == 0 or not api.engine.open_ids


RAW: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"{", "half"),
    (b"nope", "no JSON"),
    (b"[]", "a list"),
    (b'"text"', "a string"),
    (b"null", "null"),
    (b'{"model": "fake"} x', "more after it"),
    (b'{"model": "fake", "temperature": NaN}', "NaN"),
    (b'{"model": "fake", "temperature": Infinity}', "Infinity"),
    (b'{"model": "fake", "temperature": -Infinity}', "minus Infinity"),
    (b'{"model": "fake", "temperature": 1e999}', "a float that is too large"),
    (b'{"model": "fake", "n": ' + b"1" * 6000 + b"}", "an integer of 6000 digits"),
    (b'{"model": "fake", "prompt": "\\ud800"}', "a lone surrogate"),
    (b'{"model": "fake", "prompt": "\\udc00\\ud800"}', "surrogates the wrong way round"),
    (b'{"model": "fake", "prompt": "\xed\xa0\x80"}', "an encoded surrogate"),
    (b'{"model": "fake", "prompt": "\xff"}', "no UTF-8"),
    (b'\xef\xbb\xbf{"model": "fake"}', "a byte order mark"),
    ('{"model": "fake"}'.encode("utf-16"), "UTF-16"),
    (b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "100,000 deep"),
    (b'{"model": "fake", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "100 deep"),
    (b'{"logit_bias": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", "objects 500 deep"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("raw", "what"), RAW, ids=[what for _, what in RAW])
def test_a_body_that_is_not_json_is_a_400(api: Any, error: Any, path: str, raw: bytes, what: str) -> None:
    response = api.request("POST", path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=str,
)
def test_another_content_type_is_a_415(api: Any, error: Any, headers: dict[str, str]) -> None:
    response = api.request("POST", "/v1/completions", content=b"{}", headers=headers)
    assert response.status_code == 415
    assert error(response)["code"] == "unsupported_media_type"


def test_a_content_type_with_utf8_spelt_out_is_fine(api: Any) -> None:
    body = json.dumps({"model": "fake", "prompt": "hello"})
    headers = {"content-type": 'Application/JSON; charset="UTF-8"'}
    assert api.request("POST", "/v1/completions", content=body, headers=headers).status_code == 200


def test_a_body_over_the_limit_is_a_413(make_api: Any, error: Any) -> None:
    api = make_api(limits=BodyLimits(max_bytes=100))
    assert api.complete(prompt="a" * 200).status_code == 413
    assert error(api.complete(prompt="a" * 1000))["code"] == "body_too_large"
    assert api.complete().status_code == 200


def test_a_prompt_that_is_too_long_has_its_own_code(api: Any, error: Any) -> None:
    assert error(api.complete(prompt="a" * 500))["code"] == "context_length_exceeded"
    assert error(api.chat(messages=[{"role": "user", "content": "a" * 500}]))["code"] == "context_length_exceeded"
    assert error(api.complete(max_tokens=10_000))["code"] == "context_length_exceeded"
    assert error(api.complete(prompt=[5] * 128))["code"] == "context_length_exceeded"
    assert error(api.complete(prompt=[[5], [5] * 100_000]))["code"] == "context_length_exceeded"


def test_an_error_repeats_only_a_little_of_what_was_sent(api: Any, error: Any) -> None:
    for response in (
        api.complete(**{"temperatur": "x" * 100_000}),
        api.complete(max_tokens="y" * 100_000),
        api.chat(model="z" * 10_000),
    ):
        assert 400 <= response.status_code < 500 and len(response.text) < 1000


def test_an_error_says_which_rule_was_broken(api: Any, error: Any) -> None:
    for fields, rule in (
        ({"seed": 2**63}, "(less_than_equal)"), ({"seed": -(2**63) - 1}, "(greater_than_equal)"),
        ({"seed": "1"}, "(int_type)"), ({"reasoning_effort": 3}, "_type)"),
    ):  # fmt: skip
        assert error(api.chat(**fields))["message"].endswith(rule), fields


def test_another_model_is_a_404(api: Any, error: Any) -> None:
    for response in (api.chat(model="gpt-4o"), api.complete(model=""), api.complete(model="x" * 10_000)):
        assert response.status_code == 404
        assert error(response)["code"] == "model_not_found"
        assert error(response)["param"] == "model"


def test_the_whole_vocabulary_is_refused_by_default_and_the_key_is_named(api: Any, error: Any) -> None:
    answers = {
        "top_logprobs": api.chat(logprobs=True, top_logprobs=-1),
        "logprobs": api.complete(logprobs=-1),
        "prompt_logprobs": api.complete(prompt_logprobs=-1),
    }
    for name, response in answers.items():
        found = error(response)
        assert response.status_code == 400 and (found["param"], found["code"]) == (name, "invalid_value")
        assert found["message"].startswith(f"{name} is -1, the whole vocabulary") and "at most 20" in found["message"]
        assert "server.max_logprobs=" in found["message"]
    assert "at most 20" in error(api.complete(logprobs=21))["message"]
    assert error(api.complete(logprobs=-2))["param"] == "logprobs"


def test_codes_tell_unknown_missing_mistyped_and_unsupported_fields_apart(api: Any, error: Any) -> None:
    assert error(api.complete(temprature=1))["code"] == "unknown_parameter"
    assert "did you mean 'temperature'" in error(api.complete(temprature=1))["message"]
    assert error(api.complete(prompt=...))["code"] == "missing_required_parameter"
    assert error(api.complete(max_tokens="4"))["code"] == "invalid_type"
    assert error(api.complete(top_p=2))["code"] == "invalid_value"
    assert error(api.complete(logits_processors=["x"]))["code"] == "unsupported_parameter"
    assert "send []" in error(api.complete(logits_processors=["x"]))["message"]


NO_OP_FIELDS = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "stop": None,
    "stream": False, "stream_options": None, "seed": None, "user": "me", "response_format": {"type": "text"},
    "stop_token_ids": [], "min_tokens": 0, "use_beam_search": False,
}  # fmt: skip
NO_OP_CHAT_FIELDS = {
    "tools": [], "tool_choice": "none", "functions": None, "function_call": "none", "modalities": ["text"],
    "audio": None, "store": False, "metadata": None, "parallel_tool_calls": True, "service_tier": "auto",
    "logprobs": False, "top_logprobs": None, "reasoning_effort": None, "prediction": None,
    "max_completion_tokens": None,
}  # fmt: skip


def test_no_op_values_of_unsupported_fields_are_accepted(api: Any) -> None:
    assert api.chat(**NO_OP_FIELDS, **NO_OP_CHAT_FIELDS).status_code == 200
    assert api.complete(**NO_OP_FIELDS, echo=False, best_of=1, suffix=None, logprobs=None).status_code == 200


def test_null_means_unset_for_every_optional_field(api: Any) -> None:
    chat = {name: None for name in ChatBody.model_fields if name not in ("model", "messages")}
    completion = {name: None for name in CompletionBody.model_fields if name not in ("model", "prompt")}
    assert api.chat(**chat).status_code == 200
    assert api.complete(**completion).status_code == 200


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**60), 10**60)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "x"]),
        JSON | st.sampled_from(["user", "hi"]),
        max_size=4,
    ),
    max_size=3,
)
FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FUZZ
@given(data=st.data())
def test_malformed_chats_never_give_a_5xx(api: Any, data: st.DataObject) -> None:
    fields = data.draw(
        st.dictionaries(st.sampled_from(sorted(ChatBody.model_fields)) | st.text(max_size=4), JSON, max_size=4)
    )
    messages = data.draw(st.just([USER]) | MESSAGES)
    response = api.chat(**{"messages": messages, **fields})
    assert response.status_code < 500, (fields, response.text)


@FUZZ
@given(data=st.data())
def test_malformed_completions_never_give_a_5xx(api: Any, data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(CompletionBody.model_fields)), JSON, max_size=4))
    response = api.complete(**fields)
    assert response.status_code < 500, (fields, response.text)


@FUZZ
@given(raw=st.binary(max_size=40) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_arbitrary_bytes_never_give_a_5xx(api: Any, raw: bytes) -> None:
    response = api.request("POST", "/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500


def test_all_wrong_keys_of_a_logit_bias_are_named(api: Any, error: Any) -> None:
    response = api.complete(logit_bias={"5": 1, "bad1": 2, "bad2": 3})
    assert response.status_code == 400 and "'bad1', 'bad2'" in error(response)["message"]
    many = {f"bad{i}": 1 for i in range(100)}
    assert len(error(api.complete(logit_bias=many))["message"]) < 200
