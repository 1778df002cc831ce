"""Completions: prompts of every form, and what they answer."""

from __future__ import annotations

from typing import Any

import pytest

from evener_conformance.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["abc"], ["abca"]),
        (["ab", "cd"], ["abab", "cdcd"]),
        ([97, 98], ["abab"]),
        ([[97, 98], [99]], ["abab", "cccc"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_form_are_answered_in_order(
    api: Any, sse: Any, prompt: Any, texts: list[str], stream: bool
) -> None:
    response = api.complete(prompt=prompt, stream=stream)
    if not stream:
        body = response.json()
        assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * len(texts)
        return
    *events, done = sse(response)
    found = [""] * len(texts)
    for event in events:
        found[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert found == texts and done == "[DONE]"


def test_samples_are_numbered_prompt_by_prompt_and_prompts_are_billed_once(api: Any, sse: Any) -> None:
    body = api.complete(prompt=["ab", "cde"], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "abab"),
        (1, "abab"),
        (2, "cdec"),
        (3, "cdec"),
    ]
    assert body["usage"]["prompt_tokens"] == 5 and body["usage"]["completion_tokens"] == 16
    stream = sse(api.complete(prompt=["ab", "cde"], n=2, stream=True, stream_options={"include_usage": True}))
    assert stream[-2]["usage"] == body["usage"]


def test_a_completion_without_a_limit_has_16_tokens(api: Any) -> None:
    assert api.complete(max_tokens=...).json()["usage"]["completion_tokens"] == 16


def test_the_servers_own_limit_is_cut_to_the_context(make_api: Any) -> None:
    api = make_api(max_tokens=1000)
    for prompt in ("hello", [104] * 5):
        assert api.complete(prompt=prompt, max_tokens=...).json()["usage"]["total_tokens"] == 128
    assert api.complete(prompt="a" * 500, max_tokens=...).status_code == 400


def test_one_bad_prompt_of_many_runs_none(make_api: Any, error: Any) -> None:
    api = make_api()
    api.engine.hold()
    response = api.complete(prompt=["fine", "a" * 500])
    assert response.status_code == 400 and error(response)["param"] == "prompt"
    assert api.engine.open_ids == []


def test_logprobs_have_openais_shape_whole_and_streamed(api: Any, sse: Any) -> None:
    body = api.complete(prompt="hé", max_tokens=3, logprobs=1).json()["choices"][0]
    assert body["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"h": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}],
        "text_offset": [0, 1, 1],
    }
    whole: dict[str, list[Any]] = {}
    for event in sse(api.complete(prompt="hé", max_tokens=3, logprobs=1, stream=True))[:-1]:
        for key, values in (event["choices"][0]["logprobs"] or {}).items():
            whole.setdefault(key, []).extend(values)
    assert whole == body["logprobs"]


def test_logprobs_zero_gives_the_sampled_token_alone(api: Any) -> None:
    assert api.complete(prompt="h", max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [
        {"h": -0.5}
    ]


def test_a_model_without_a_tokenizer_takes_ids(make_api: Any, error: Any, tmp_path: Any) -> None:
    api = make_api(FakeEngine(), model=tmp_path)
    body = api.complete(prompt=[1, 2], logprobs=0).json()
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:1", "token_id:2", "token_id:1", "token_id:2"]
    assert api.complete(prompt="text").status_code == 400
    assert error(api.complete(prompt=[1], stop="x"))["param"] == "stop"
