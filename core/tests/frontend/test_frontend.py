"""Requests to messages, events to deltas."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener import SamplingParams
from evener.contracts.outputs import FinishReason, PromptOutputs, RequestOutput
from evener.engine.wire.messages import Abort, Dead, Finish, Finished, NewRequest, Ready, TokenLogprobs, Tokens
from evener.errors import ContextLengthError, RequestError
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.frontend import Frontend, sample_seed
from evener.frontend.outputs import OutputBuilder
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files
from evener_conformance.fake_engine import FakeEngine

EOS = 258


@pytest.fixture
def frontend(tiny_dir: Path) -> Frontend:
    return make(tiny_dir)


def make(folder: Path, **changes: Any) -> Frontend:
    options: dict[str, Any] = {
        "max_model_len": 32,
        "vocab_size": 259,
        "tokenizer": Tokenizer.of(open_files(folder)),
        "defaults": GenerationDefaults(temperature=0.7, top_k=5, eos_ids=(EOS, 256)),
        "rng": random.Random(1),
    }
    return Frontend(**(options | changes))


def submit(frontend: Frontend, prompt: str | list[int], params: SamplingParams, *rest: Any) -> list[NewRequest]:
    """``rest``: the request's id and kind."""
    return frontend.submit(frontend.prepare(prompt, params, *rest[1:]), rest[0])


def play(frontend: Frontend, prompt: str, params: SamplingParams, *events: Any) -> tuple[RequestOutput, list[Any]]:
    """Submit as request "r", play the events, and put together what came out."""
    messages = submit(frontend, prompt, params, "r")
    builder, replies = OutputBuilder("r", prompt, messages[0].prompt, params.n), []
    for event in events:
        deltas, more = frontend.handle(event)
        replies += more
        for delta in deltas:
            builder.add(delta)
    return builder.snapshot(), replies


def tokens(text: str, request_id: str = "r") -> Tokens:
    return Tokens(id=request_id, ids=list(text.encode()))


def finished(reason: FinishReason = "stop", request_id: str = "r", error: str | None = None) -> Finished:
    return Finished(id=request_id, reason=reason, error=error)


def test_a_request_becomes_one_message_with_the_models_defaults(frontend: Frontend) -> None:
    (message,) = submit(frontend, "ab", SamplingParams(seed=7), "r")
    assert (message.id, message.prompt, message.max_tokens, message.stop_token_ids) == ("r", [97, 98], 16, [256, EOS])
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 5, 1.0, 0.0)
    assert (sampling.seed, sampling.logprobs) == (7, None)


def test_request_values_override_the_models_defaults(frontend: Frontend) -> None:
    params = SamplingParams(temperature=0, top_k=-1, top_p=0.5, min_p=0.1, ignore_eos=True, logprobs=2, max_tokens=3)
    (message,) = submit(frontend, "ab", params, "r")
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 0.5, 0.1)
    assert (message.max_tokens, message.stop_token_ids, sampling.logprobs) == (3, [], 2)


def test_a_chat_may_use_the_rest_of_the_context_and_a_completion_16_tokens(tiny_dir: Path, frontend: Frontend) -> None:
    assert submit(frontend, "ab", SamplingParams(), "chat", "chat")[0].max_tokens == 30
    assert submit(frontend, "a" * 20, SamplingParams(), "completion")[0].max_tokens == 12
    assert submit(make(tiny_dir, default_max_tokens=5), "ab", SamplingParams(), "r", "chat")[0].max_tokens == 5


def test_samples_have_ids_and_seeds_of_their_own_that_follow_from_the_requests(frontend: Frontend) -> None:
    messages = submit(frontend, "ab", SamplingParams(n=3, seed=7), "r")
    assert [message.id for message in messages] == ["r-0", "r-1", "r-2"]
    assert [message.fork_of for message in messages] == ["", "r-0", "r-0"]
    seeds = [message.sampling.seed for message in messages]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert seeds == [m.sampling.seed for m in submit(frontend, "x", SamplingParams(n=3, seed=7), "q")]


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 127))
def test_seeds_fit_into_31_bits(seed: int, index: int) -> None:
    assert 0 <= sample_seed(seed, index) < 2**31


def test_requests_without_a_seed_get_different_ones(frontend: Frontend) -> None:
    first, second = (submit(frontend, "ab", SamplingParams(), name)[0].sampling.seed for name in "pq")
    assert first != second


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(frontend: Frontend) -> None:
    with pytest.raises(ContextLengthError, match=r"32 tokens .* do not fit the context of 32 tokens") as caught:
        submit(frontend, "a" * 32, SamplingParams(), "r", "chat")
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert submit(frontend, "a" * 31, SamplingParams(), "r")[0].max_tokens == 1


@pytest.mark.parametrize(("prompt", "most"), [("a" * 5_000, None), ("a" * 32, None), ("a" * 30, 3)])
def test_a_context_that_is_too_short_says_why_it_is(prompt: str, most: int | None, tiny_dir: Path) -> None:
    frontend = make(tiny_dir, context_reason="little memory")
    with pytest.raises(ContextLengthError, match=r"do(es)? not fit the context of 32 tokens \(little memory\)"):
        frontend.prepare(prompt, SamplingParams(max_tokens=most), "chat")


def test_a_prompt_with_too_many_new_tokens_is_refused_with_what_is_left(frontend: Frontend) -> None:
    with pytest.raises(ContextLengthError, match=r"30 tokens and max_tokens is 3: together 33.*at most 2 tokens"):
        submit(frontend, "a" * 30, SamplingParams(max_tokens=3), "r")
    assert frontend.num_open == 0


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 259], "259 at position 1, which is out of vocabulary: ids of the 259 tokens are integers from 0 to 258"),
        ([-1], "-1 at position 0"),
        ([True], "True at position 0"),
        ("a\ud800", "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_an_error_that_says_why(frontend: Frontend, prompt: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        submit(frontend, prompt, SamplingParams(), "r")
    assert caught.value.param == "prompt"


def test_an_id_in_use_is_refused_until_the_request_has_ended(frontend: Frontend) -> None:
    submit(frontend, "ab", SamplingParams(n=2), "r")
    for name in ("r", "r-1"):
        with pytest.raises(RequestError, match="in use"):
            submit(frontend, "ab", SamplingParams(), name)
    frontend.handle(finished(request_id="r-0"))
    frontend.handle(finished(request_id="r-1"))
    submit(frontend, "ab", SamplingParams(), "r")


def test_without_a_tokenizer_there_are_ids_only(tiny_dir: Path) -> None:
    frontend = make(tiny_dir, tokenizer=None)
    with pytest.raises(RequestError, match=r"no tokenizer: give token ids .*SamplingParams\(detokenize=False\)"):
        submit(frontend, "ab", SamplingParams(detokenize=False), "r")
    with pytest.raises(RequestError, match="text was asked for"):
        submit(frontend, [1], SamplingParams(), "r")
    submit(frontend, [1], SamplingParams(detokenize=False), "r")
    (delta,), _ = frontend.handle(Tokens(id="r", ids=[5, 6]))
    assert (delta.text, delta.token_ids) == ("", [5, 6])


def test_the_eos_token_is_reported_but_not_shown(frontend: Frontend) -> None:
    params = SamplingParams(skip_special_tokens=False)
    output, _ = play(frontend, "ab", params, tokens("hi"), Tokens(id="r", ids=[EOS]), finished())
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids) == ("hi", [104, 105, EOS])
    assert (sample.finish_reason, sample.stop_reason, output.finished) == ("stop", None, True)


def test_eos_is_ordinary_with_ignore_eos(frontend: Frontend) -> None:
    params = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    output, _ = play(frontend, "ab", params, Tokens(id="r", ids=[104, EOS, 105]), finished("length"))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("h<|im_end|>i", "length")


def test_whether_eos_ends_a_request_that_does_not_say_is_the_front_ends_setting(tiny_dir: Path) -> None:
    frontend = make(tiny_dir, stop_with_eos=False)
    assert submit(frontend, "a", SamplingParams(), "p")[0].stop_token_ids == []
    assert submit(frontend, "a", SamplingParams(ignore_eos=False), "q")[0].stop_token_ids == [256, EOS]


def test_a_stop_string_finishes_the_request_and_later_tokens_are_dropped(frontend: Frontend) -> None:
    events = [tokens("one E"), tokens("ND two"), tokens("three"), finished()]
    output, replies = play(frontend, "ab", SamplingParams(stop=["END", "x"]), *events)
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one ", "stop", "END")
    assert bytes(sample.token_ids) == b"one END"
    assert replies == [Finish("r")]
    assert frontend.num_open == 0


def test_a_stop_string_is_the_reason_even_when_the_length_was_reached_with_it(frontend: Frontend) -> None:
    output, _ = play(frontend, "ab", SamplingParams(stop="END"), tokens("END"), finished("length"))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "END")


def test_text_that_was_held_back_comes_with_the_end(frontend: Frontend) -> None:
    events = [tokens("a EN"), Tokens(id="r", ids=[0xC3]), finished("length")]
    output, _ = play(frontend, "ab", SamplingParams(stop="END"), *events)
    assert output.outputs[0].text == "a EN\ufffd"


def test_a_stop_string_in_the_last_held_back_text_counts(frontend: Frontend) -> None:
    output, _ = play(frontend, "ab", SamplingParams(stop="\ufffd"), tokens("a"), Tokens(id="r", ids=[0xC3]), finished())
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", "\ufffd")


def test_log_probabilities_are_one_dict_a_token_with_the_sampled_one_first(frontend: Frontend) -> None:
    entries = [
        TokenLogprobs(ids=[101, 5, 6], values=[-3.0, -0.1, -2.0]),
        TokenLogprobs(ids=[5, 5, 6], values=[-1.0, -1.0, -2]),
    ]
    event = Tokens(id="r", ids=[101, 5], logprobs=entries, cached=2)
    output, _ = play(frontend, "ab", SamplingParams(logprobs=2), event, finished("length"))
    assert output.outputs[0].logprobs == [{101: -3.0, 5: -0.1, 6: -2.0}, {5: -1.0, 6: -2.0}]
    assert next(iter(output.outputs[0].logprobs[0])) == 101
    assert output.num_cached_tokens == 2


def test_log_probabilities_end_where_the_stop_string_does(frontend: Frontend) -> None:
    entries = [TokenLogprobs(ids=[i], values=[-1.0]) for i in b"aEb"]
    event = Tokens(id="r", ids=list(b"aEb"), logprobs=entries)
    output, _ = play(frontend, "ab", SamplingParams(stop="E", logprobs=0), event, finished())
    assert len(output.outputs[0].logprobs or []) == len(output.outputs[0].token_ids) == 2


def test_aborting_a_request_aborts_the_samples_that_still_run(frontend: Frontend) -> None:
    submit(frontend, "ab", SamplingParams(n=3), "r")
    frontend.handle(finished(request_id="r-1"))
    assert frontend.abort("r") == [Abort("r-0"), Abort("r-2")]
    assert frontend.abort("unknown") == []


def test_every_sample_gets_one_last_delta_when_the_engine_dies(frontend: Frontend) -> None:
    submit(frontend, "ab", SamplingParams(n=2), "r")
    frontend.handle(finished(request_id="r-0"))
    submit(frontend, "ab", SamplingParams(), "q")
    deltas, _ = frontend.handle(Dead("out of memory"))
    assert [(d.request_id, d.index, d.finish_reason, d.status) for d in deltas] == [
        ("r", 1, "error", 503),
        ("q", 0, "error", 503),
    ]
    assert all("out of memory" in (delta.error or "") for delta in deltas)
    assert frontend.handle(Dead("again")) == ([], [])


def test_an_error_of_one_request_carries_its_reason_and_status(frontend: Frontend) -> None:
    submit(frontend, "ab", SamplingParams(), "r")
    (delta,), _ = frontend.handle(Finished(id="r", reason="error", error="too big", status=400))
    assert (delta.finish_reason, delta.error, delta.status) == ("error", "too big", 400)


def test_events_of_unknown_requests_are_ignored(frontend: Frontend) -> None:
    for event in (tokens("a", "who"), finished(request_id="who"), Ready(info=FakeEngine().info)):
        assert frontend.handle(event) == ([], [])


@given(
    text=st.text(max_size=12),
    cuts=st.lists(st.integers(1, 4), max_size=20),
    stop=st.sampled_from([None, "a", "ab", "é"]),
    reason=st.sampled_from(["stop", "length", "timeout", "abort", "error"]),
)
def test_output_is_independent_of_event_boundaries(
    tiny_dir: Path, text: str, cuts: list[int], stop: str | None, reason: FinishReason
) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = list(text.encode())
    events: list[Any] = []
    for cut in cuts:
        events += [Tokens(id="r", ids=ids[:cut])] if ids else []
        ids = ids[cut:]
    events += [Tokens(id="r", ids=ids), finished(reason)]
    output, _ = play(make(tiny_dir), "x", SamplingParams(stop=stop), *events)
    found = stop is not None and stop in text
    assert output.outputs[0].text == (text.split(stop)[0] if stop else text)
    assert output.outputs[0].finish_reason == ("stop" if found else reason)
    assert (output.error is None) == (found or reason != "error")


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(temperature: float) -> None:
    frontend = Frontend(max_model_len=64, vocab_size=300)
    (request,) = submit(frontend, [1], SamplingParams(temperature=temperature, top_k=2**40, detokenize=False), "r")
    assert request.sampling.temperature == 0.0 and request.sampling.top_k == 300


@pytest.mark.parametrize("ranges", [[(0, 4)], [(-1, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 3)], [(2, 1)]])
def test_rows_are_wanted_of_ascending_positions_of_the_prompt(frontend: Frontend, ranges: Any) -> None:
    wanted = SamplingParams(max_tokens=1, detokenize=False, prompt_outputs=PromptOutputs("hidden", ranges))
    with pytest.raises(RequestError, match="must be ascending, within the prompt's 3 tokens") as raised:
        frontend.prepare([5, 6, 7], wanted)
    assert raised.value.param == "prompt_outputs"


def test_a_model_without_a_final_norm_of_its_own_refuses_states_after_it(tiny_dir: Path) -> None:
    wanted = SamplingParams(max_tokens=1, detokenize=False, prompt_outputs=PromptOutputs("normed", [(0, 1)]))
    (message,) = submit(make(tiny_dir), [5, 6], wanted, "r")
    assert message.sampling.prompt_outputs == wanted.prompt_outputs
    with pytest.raises(RequestError, match="ask for kind 'hidden'") as raised:
        submit(make(tiny_dir, final_norm=False), [5, 6], wanted, "r")
    assert raised.value.param == "prompt_outputs"


def test_only_the_first_sample_wants_rows_of_the_prompt(frontend: Frontend) -> None:
    wanted = SamplingParams(n=2, max_tokens=1, detokenize=False, prompt_outputs=PromptOutputs("logits", [(1, 3)]))
    first, second = frontend.submit(frontend.prepare([5, 6, 7], wanted), "r")
    assert (first.sampling.prompt_outputs, second.sampling.prompt_outputs) == (wanted.prompt_outputs, None)
