"""What may be asked of a request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener import SamplingParams
from evener.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", 1e30),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", ["x"] * 33),
        ("stop", "x" * 1025),
        ("stop", 5),
        ("logprobs", -2),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("max_time", 0),
        ("max_time", float("inf")),
        ("frequency_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("presence_penalty", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e9),
        ("prompt_logprobs", -2),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [0] * 257),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: None}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("inf")}),
        ("logit_bias", [5]),
        ("logit_bias", dict.fromkeys(range(513), 0.0)),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-1, max_tokens=1, logprobs=0, n=1)
    SamplingParams(
        frequency_penalty=-2, presence_penalty=2, repetition_penalty=0.01,
        logit_bias={0: -100, 1: 100, 2: -float("inf")},
    )  # fmt: skip
    SamplingParams(min_tokens=3, max_tokens=3, stop_token_ids=(0, 5), max_time=1e-9, prompt_logprobs=20)


def test_min_tokens_above_max_tokens_is_an_error() -> None:
    with pytest.raises(RequestError, match="min_tokens is 4, but max_tokens is 3") as caught:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert caught.value.param == "min_tokens"


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.lists(st.integers() | st.text(max_size=2), max_size=3)
    | st.dictionaries(st.integers() | st.text(max_size=2), st.none() | st.floats() | st.integers(), max_size=3)
)  # fmt: skip


@given(st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), ANYTHING)
def test_any_value_is_accepted_or_rejected_naming_the_field(name: str, value: Any) -> None:
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert error.param == name and str(error).startswith(name)
    else:
        assert getattr(params, name) is value


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize=False"):
        SamplingParams(stop="x", detokenize=False)


def test_a_single_stop_string_is_one_of_a_list() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_params_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[call-arg]
