"""Log-probabilities of the whole vocabulary: those of the naive engine, beside requests that want few or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evener_pooling.rows import MAX_LOGPROB_ENTRIES, TokenRows
from knowing_drafter import KnowingDrafter

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling, Tokens
from evener.errors import RequestError
from evener.frontend.frontend import Frontend
from evener.sampling_params import SamplingParams
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.executor import strict_controller
from evener_generation.drafting.speculation import Speculation

DELAYED = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24}
ONE_LAYER = {"num_hidden_layers": 1}
CONFIG = {**find_architecture("LlamaForCausalLM").tiny_config(), **ONE_LAYER}
VOCABULARY = CONFIG["vocab_size"]
PROMPT = [7 * i % 200 + 1 for i in range(40)]


def asks(name: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> NewRequest:
    fork_of = fields.pop("fork_of", "")
    sampling = Sampling(**{"temperature": 0.0, **fields})
    return NewRequest(id=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling, fork_of=fork_of)


def read(played: Any, name: str, most: tuple[int, int]) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    """The log-probabilities that a request got, of its tokens and of its prompt, and nothing else."""
    params = SamplingParams(logprobs=most[0], prompt_logprobs=most[1])
    rows = TokenRows(params, most, (1, 1), VOCABULARY, final_norm=True)
    event = Tokens(id=name, ids=played.tokens[name], logprobs=played.logprobs.get(name),
                   prompt_logprobs=played.prompt_logprobs.get(name), pooled=played.pooled[name])  # fmt: skip
    samples, prompt, rest = rows.read(event)
    assert rest == b""
    return samples, prompt


def check(entries: list[dict[int, float]], text: list[int], first: int, count: int = VOCABULARY) -> None:
    """``entries`` are the distributions of the naive engine for the tokens of ``text`` from position ``first`` on."""
    rows = NaiveModel(CONFIG, max_positions=128).logits(text)[first - 1 : -1].float().log_softmax(-1)
    assert len(entries) == len(text) - first
    for found, row, token in zip(entries, rows, text[first:], strict=True):
        assert next(iter(found)) == token and len(found) in (count, count + 1)
        values = torch.tensor(list(found.values()))
        torch.testing.assert_close(values, row[list(found)], atol=1e-5, rtol=1e-5)
        assert sorted(found.values(), reverse=True)[:count] == pytest.approx(row.topk(count).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_request_gets_the_whole_vocabulary_and_those_beside_it_what_they_ask_for(
    make_config: Any, play: Any, depth: int
) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
    messages = [
        asks("whole", PROMPT, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY),
        asks("fork", PROMPT, logprobs=VOCABULARY, fork_of="whole", temperature=1.0, seed=3),
        asks("fifty", PROMPT[:9], logprobs=50, prompt_logprobs=2), asks("two", PROMPT[3:20], logprobs=2),
        asks("none", PROMPT[5:]),
    ]  # fmt: skip
    played = play(controller, messages)
    for message in messages[:-1]:
        counts = message.sampling.logprobs or 0, message.sampling.prompt_logprobs or 0
        samples, prompt = read(played, message.id, counts)
        check(samples, [*message.prompt, *played.tokens[message.id]], len(message.prompt), counts[0])
        if counts[1]:
            check(prompt, message.prompt, 1, counts[1])
    assert played.pooled["two"] == b""
    assert "none" not in played.logprobs or played.logprobs["none"] == []


def steps_of(controller: Controller, play: Any, message: NewRequest) -> int:
    played = play(controller, [message])
    assert len(played.tokens[message.id]) == message.max_tokens
    return controller.scheduler.stats.steps


def test_a_prompt_whose_rows_go_to_the_host_takes_steps_of_few_tokens(make_config: Any, play: Any) -> None:
    def controller() -> Controller:
        return strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.step_tokens": 512}))[0]

    quick = steps_of(controller(), play, asks("few", PROMPT, 1, prompt_logprobs=20))
    slow = steps_of(controller(), play, asks("whole", PROMPT, 1, prompt_logprobs=21))
    assert quick == 1 and slow == len(PROMPT) // 4  # 512 / 128 tokens a step


def test_preemption_and_drafts_keep_the_whole_vocabulary(make_config: Any, play: Any, shrink_pool: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.step_tokens": 4096}))
    controller.scheduler.drafts = Speculation(KnowingDrafter, 4, max_samples=8, vocabulary=10**9)
    shrink_pool(controller, 6)
    messages = [
        asks(name, [ord(name), *range(30)], 30, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY) for name in "abc"
    ]
    naive = NaiveModel(CONFIG, max_positions=128)
    KnowingDrafter.answers = [[*each.prompt, *naive.greedy(each.prompt, 30)] for each in messages]
    played = play(controller, messages)
    assert controller.scheduler.stats.preemptions > 0 and controller.scheduler.stats.accepted_tokens > 0
    for message in messages:
        samples, prompt = read(played, message.id, (VOCABULARY, VOCABULARY))
        check(prompt, message.prompt, 1)
        check(samples, [*message.prompt, *played.tokens[message.id]], len(message.prompt))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_ranks_give_the_distributions_of_one_rank(tp: int, pp: int, make_lively: Any, play: Any) -> None:
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    messages = [asks("whole", PROMPT, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY)]
    alone = play(build_controller(make_lively("Llama", changes))[0], messages)
    config = make_lively("Llama", changes, **{"infer.tp_size": tp, "infer.pp_size": pp})
    with rank_threads(config) as (controller, *_):
        found = play(controller, messages)
    assert found.tokens == alone.tokens
    both = [read(played, "whole", (VOCABULARY, VOCABULARY)) for played in (found, alone)]
    for mine, theirs in (pair for kind in zip(*both, strict=True) for pair in zip(*kind, strict=True)):
        assert len(mine) == VOCABULARY
        assert mine == pytest.approx(theirs, rel=1e-2, abs=1e-2)


def test_a_request_for_more_log_probabilities_than_memory_is_kept_for_is_refused_with_what_fits() -> None:
    frontend = Frontend(max_model_len=10_000, vocab_size=100_000)
    prompt, most = [1] * 100, MAX_LOGPROB_ENTRIES // 100_000
    fits = SamplingParams(max_tokens=most, logprobs=-1, detokenize=False)
    assert frontend.submit(frontend.prepare(prompt, fits), "a")[0].sampling.logprobs == 100_000
    for params, name in (
        (SamplingParams(max_tokens=most + 1, logprobs=-1, detokenize=False), "logprobs"),
        (SamplingParams(max_tokens=most, n=2, logprobs=-1, detokenize=False), "logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False), "prompt_logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=10**9, detokenize=False), "prompt_logprobs"),
    ):
        with pytest.raises(RequestError, match=rf"{name} asks for 100000 .* at most {most} tokens") as refused:
            frontend.prepare(prompt, params)
        assert refused.value.param == name
    # The likeliest 20 of every token never take so much.
    frontend.prepare([1] * 9_000, SamplingParams(max_tokens=1000, logprobs=20, prompt_logprobs=20, detokenize=False))
