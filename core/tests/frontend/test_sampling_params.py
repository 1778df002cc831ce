"""What may be asked of a request."""

from __future__ import annotations

from typing import Any

import pytest

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
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("detokenize", None),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=-1, max_tokens=1, logprobs=0, n=1)


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
