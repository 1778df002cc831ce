"""``server.sampling_defaults``: what requests get that do not name a value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener_server.options import ServerOptions
from evener_server.sampling_defaults import read_defaults

TEXT = (
    "temperature=0.25, top_p=0.5,top_k=7,min_p=0.125,repetition_penalty=1.5,frequency_penalty=0.5,presence_penalty=-1"
)


def last(api: Any) -> Sampling:
    return [message for message in api.engine.sent if isinstance(message, NewRequest)][-1].sampling


def test_a_request_that_names_no_value_gets_the_operator_s(make_api: Any) -> None:
    api = make_api(options=ServerOptions(sampling_defaults=TEXT))
    for _ in (api.chat(), api.complete(prompt="ab"), api.complete(prompt="ab", temperature=None)):
        found = last(api)
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.25, 0.5, 7, 0.125)
        assert (found.repetition_penalty, found.frequency_penalty, found.presence_penalty) == (1.5, 0.5, -1)
    assert api.post("/v1/responses", {"input": "hi"}).status_code == 200 and last(api).temperature == 0.25
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    assert api.post("/v1/messages", body).status_code == 200 and last(api).temperature == 0.25


def test_a_value_of_the_request_wins_also_where_it_is_zero(make_api: Any) -> None:
    api = make_api(options=ServerOptions(sampling_defaults=TEXT))
    api.chat(temperature=1, top_p=1, top_k=0, frequency_penalty=0)
    found = last(api)
    assert (found.temperature, found.top_p, found.top_k, found.frequency_penalty) == (1, 1, 0, 0)
    assert (found.min_p, found.presence_penalty) == (0.125, -1)
    # KsanaLLM's endpoint is greedy unless the request says otherwise.
    api.post("/generate", {"prompt": "a", "stream": False})
    assert last(api).temperature == 0


def test_beam_search_has_no_use_for_defaults(make_api: Any) -> None:
    api = make_api(options=ServerOptions(sampling_defaults=TEXT))
    assert api.complete(prompt="ab", use_beam_search=True, num_beams=2).status_code == 200


def test_defaults_may_be_written_as_vllm_does() -> None:
    assert read_defaults(json.dumps({"temperature": 0, "top_k": 5})) == {"temperature": 0, "top_k": 5}
    assert read_defaults(" top_k = 5 ,") == {"top_k": 5} and read_defaults("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperatur=0", r"'temperatur', which is not a sampling parameter.*did you mean 'temperature'"),
        ("detokenize=1", "'detokenize', which is not a sampling parameter that can have a default; known: frequency"),
        ("max_tokens=5", r"max_tokens, which is a key: set request\.max_new_tokens=5"),
        ('{"max_new_tokens": 5}', r"set request\.max_new_tokens=5"),
        ("temperature", "'temperature'; give NAME=NUMBER, as in temperature=0,top_p=0.9"),
        ("temperature=warm", "temperature is 'warm'; give a number"),
        ("top_k=1.5", "top_k is '1.5'; give a whole number"),
        ('{"top_k": true}', "top_k is True; give a whole number"),
        ('{"temperature": [1]}', r"temperature is \[1\]; give a number"),
        ("temperature=nan", "temperature must be a number from 0 to 1000"),
        ("top_p=1.5", "top_p must be a number from 0 to 1"),
        ("top_p=0.5,top_p=0.6", "has top_p twice"),
        ('{"top_p": 0.5', "is not JSON"),
    ],
)
def test_wrong_defaults_are_an_error_that_says_what_to_give(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^server\.sampling_defaults.*{message}"):
        read_defaults(text)
