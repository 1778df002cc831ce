"""Dynamo's requests as our parameters."""

from __future__ import annotations

from typing import Any

import pytest

from evener.errors import RequestError
from evener_deploy.dynamo_request import sampling


def test_options_that_dynamo_and_we_share_are_taken_over() -> None:
    found = sampling({
        "token_ids": [1],
        "sampling_options": {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 7, "n": 1, "best_of": None,
                             "frequency_penalty": 0.25, "use_beam_search": False, "length_penalty": 1.0},
        "stop_conditions": {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop": ["x"],
                            "stop_token_ids_hidden": [2, 3]},
        "output_options": {"logprobs": None, "skip_special_tokens": True},
    })  # fmt: skip
    assert (found.temperature, found.top_p, found.top_k, found.seed, found.frequency_penalty) == (0.5, 0.9, 20, 7, 0.25)
    assert (found.max_tokens, found.min_tokens, found.ignore_eos) == (9, 2, True)
    assert list(found.stop_token_ids) == [2, 3] and found.stop is None and not found.detokenize


def test_a_request_that_says_nothing_has_our_defaults() -> None:
    assert sampling({"token_ids": [1]}).temperature is None
    assert sampling({"token_ids": [1], "sampling_options": None, "stop_conditions": None}).max_tokens is None


@pytest.mark.parametrize(
    ("part", "fields", "name"),
    [
        ("sampling_options", {"n": 2}, "n"),
        ("sampling_options", {"guided_decoding": {"json": {}}}, "guided_decoding"),
        ("stop_conditions", {"max_thinking_tokens": 5}, "max_thinking_tokens"),
        ("output_options", {"logprobs": 2}, "logprobs"),
        ("output_options", {"logprobs": 1}, "logprobs"),
        ("output_options", {"logprobs": 0}, "logprobs"),
        ("sampling_options", {"use_beam_search": True}, "use_beam_search"),
        ("sampling_options", {"temperature": -1.0}, "temperature"),
    ],
)
def test_unsupported_options_are_refused_by_name(part: str, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        sampling({"token_ids": [1], part: fields})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["multi_modal_data", "prefill_result", "bootstrap_info"])
def test_images_and_prompts_computed_elsewhere_are_refused_and_not_ignored(name: str) -> None:
    assert sampling({"token_ids": [1], name: None}).temperature is None
    with pytest.raises(RequestError) as caught:
        sampling({"token_ids": [1], name: {"image_url": ["data:"]}})
    assert caught.value.param == name
