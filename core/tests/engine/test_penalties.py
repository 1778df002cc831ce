"""Penalties, biases and forbidden tokens: equal to plain Python and transformers, and independent of batching,
preemption and depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from evener.engine.controller.controller import Controller
from evener.engine.wire.messages import LogitBias, NewRequest, Sampling
from evener.ops.reference import sampling as reference
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.reference.executor import strict_controller

DELAYED = {"reference.delay": True}
ONE_LAYER = {"num_hidden_layers": 1}
#: Most of them ask for repetition, which a model of random weights does not show by itself.
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": -1.25},
    "presence": {"presence_penalty": -2.0},
    "all": {"repetition_penalty": 0.7, "frequency_penalty": 0.5, "presence_penalty": -1.5},
}


def greedy(**fields: Any) -> Sampling:
    return Sampling(temperature=0.0, **fields)


def adjusted(message: NewRequest) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """What the parameters mean, a token at a time."""
    sampling = message.sampling

    def adjust(found: list[int], logits: torch.Tensor) -> torch.Tensor:
        for bias in sampling.bias:
            if not bias.count or len(found) < bias.count:
                logits[bias.token] += bias.value
        for token in {*message.prompt, *found}:
            x = logits[token]
            logits[token] = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
        for token in set(found):
            logits[token] -= sampling.frequency_penalty * found.count(token)
            logits[token] -= sampling.presence_penalty
        return logits

    return adjust


@pytest.fixture(scope="module")
def naive() -> Callable[[NewRequest], list[int]]:
    model = NaiveModel({**find_architecture("LlamaForCausalLM").tiny_config(), **ONE_LAYER}, max_positions=128)
    return lambda m: model.greedy(m.prompt, m.max_tokens, m.stop_token_ids, adjusted(m))


@pytest.fixture
def depths(make_config: Any, play: Any, shrink_pool: Any) -> Callable[..., tuple[list[Any], list[Controller]]]:
    """Play the same requests at several depths, on a device that delays its results."""

    def run(messages: list[NewRequest], blocks: int | None = None, at: Sequence[int] = (1, 2, 3), **how: Any) -> Any:
        played, controllers = [], []
        for depth in at:
            controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
            if blocks is not None:
                shrink_pool(controller, blocks)
            played.append(play(controller, messages, **how))
            assert controller.scheduler.state.pool.used == 0
            controllers.append(controller)
        return played, controllers

    return run


def requests(*kinds: Sampling, count: int = 6) -> list[NewRequest]:
    """Prompts that repeat themselves, half of them with a common beginning; longer than a step's budget."""
    shared = [7 * i % 50 + 1 for i in range(33)]
    return [
        NewRequest(
            id=f"r{i}", prompt=[*(shared if i % 2 else []), *range(3 + i, 12 + 2 * i)], max_tokens=8 + 3 * i,
            sampling=kinds[i % len(kinds)],
        )
        for i in range(count)
    ]  # fmt: skip


def test_depths_agree_with_the_naive_engine_on_penalized_requests_in_mixed_batches(depths: Any, naive: Any) -> None:
    kinds = [greedy(**fields) for fields in PENALTIES.values()]
    messages = requests(greedy(), *kinds, greedy(bias=[LogitBias(9, 4.0), LogitBias(11, -100.0)]), count=8)
    played, controllers = depths(messages, arrivals={m.id: 3 * i for i, m in enumerate(messages)})
    assert played[0].tokens == played[1].tokens == played[2].tokens
    for controller in controllers:
        assert controller.scheduler.stats.mixed_steps > 0 and controller.scheduler.stats.prefix_hits >= 2
    assert played[0].tokens == {m.id: naive(m) for m in messages}


def test_penalties_change_the_sampled_tokens(naive: Any) -> None:
    plain = [naive(m) for m in requests(greedy(), count=3)]
    for kind, fields in PENALTIES.items():
        assert [naive(m) for m in requests(greedy(**fields), count=3)] != plain, kind


@pytest.mark.parametrize("kind", [k if k == "all" else pytest.param(k, marks=pytest.mark.slow) for k in PENALTIES])
def test_counts_are_right_after_preemption_and_recomputation(depths: Any, naive: Any, kind: str) -> None:
    sampling = greedy(**PENALTIES[kind], bias=[LogitBias(3, 2.0)])
    messages = [
        NewRequest(id=name, prompt=[ord(name), *range(13)], max_tokens=24, sampling=sampling) for name in "abcd"
    ]
    played, controllers = depths(messages, blocks=6)
    assert all(c.scheduler.stats.preemptions > 0 for c in controllers)
    assert played[0].tokens == played[1].tokens == played[2].tokens == {m.id: naive(m) for m in messages}


def test_a_reused_slot_keeps_no_state_of_an_aborted_request(depths: Any, naive: Any) -> None:
    heavy = greedy(**PENALTIES["all"], bias=[LogitBias(token, 50.0) for token in range(20, 30)])
    messages = [*requests(heavy, count=4), *(
        NewRequest(id=f"late{i}", prompt=[4 + i, 5, 6], max_tokens=10, sampling=greedy()) for i in range(4)
    )]  # fmt: skip
    played, _ = depths(messages, aborts={f"r{i}": 2 + i for i in range(4)})
    assert played[0].tokens["r0"], "they ran"
    for one in played:
        assert {name: t for name, t in one.tokens.items() if name.startswith("late")} == {
            m.id: naive(m) for m in messages[4:]
        }


def test_random_requests_agree_at_every_depth_and_do_not_depend_on_the_batch(depths: Any) -> None:
    warm = [Sampling(temperature=1.2, top_p=0.95, seed=5, **fields) for fields in PENALTIES.values()]
    messages = requests(*warm, greedy(), count=5)
    played, _ = depths(messages)
    assert played[0].tokens == played[1].tokens == played[2].tokens
    for message in messages:
        alone, _ = depths([message], at=(2,))
        assert alone[0].tokens[message.id] == played[0].tokens[message.id]


@pytest.mark.parametrize("depth", [1, 2])
def test_min_tokens_masks_only_stop_tokens(make_config: Any, play: Any, naive: Any, depth: int) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED, **{"infer.depth": depth}))
    free = NewRequest(id="free", prompt=[3, 4, 5], max_tokens=20, sampling=greedy())
    stop = naive(free)[1]
    barred = NewRequest(
        id="barred", prompt=free.prompt, max_tokens=20, stop_token_ids=[stop],
        sampling=greedy(bias=[LogitBias(stop, -math.inf, 6), LogitBias(stop, 1000.0)]),
    )  # fmt: skip
    played = play(controller, [free, barred])
    assert played.reasons() == {"free": "length", "barred": "stop"}
    assert stop not in played.tokens["barred"][:6] and played.tokens["barred"][6:] == [stop]
    assert played.tokens["barred"] == naive(barred)


def test_logprobs_are_computed_before_penalties(make_config: Any, play: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    changes = {**PENALTIES["all"], "bias": [LogitBias(40, 100.0), LogitBias(1, -100.0)]}
    plain, changed = (
        NewRequest(id=name, prompt=[5, 6, 7], max_tokens=1, sampling=greedy(logprobs=5, **fields))
        for name, fields in (("plain", {}), ("changed", changes))
    )
    played = play(controller, [plain, changed])
    (a,), (b,) = played.logprobs["plain"], played.logprobs["changed"]
    assert played.tokens["changed"] == [40] and b.ids[0] == 40
    assert (a.ids[1:], a.values[1:]) == (b.ids[1:], b.values[1:])


def test_each_request_gets_as_many_log_probabilities_as_it_asked_for(make_config: Any, play: Any) -> None:
    controller, _ = strict_controller(make_config("Llama", ONE_LAYER, **DELAYED))
    messages = [
        NewRequest(id=f"r{n}", prompt=[5, n], max_tokens=3, sampling=greedy(logprobs=n, prompt_logprobs=5 - n))
        for n in (0, 2, 5)
    ]
    played = play(controller, messages)
    for n in (0, 2, 5):
        assert {len(entry.ids) for entry in played.logprobs[f"r{n}"]} == {n + 1}
        assert {len(entry.ids) for entry in played.prompt_logprobs[f"r{n}"]} == {6 - n}


LENGTH, VOCABULARY = 40, 97


def state(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, tokens, prompt lengths and lengths."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCABULARY, generator=generator) * 5
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator, dtype=torch.int32)
    lengths = torch.randint(2, LENGTH + 1, (rows,), generator=generator, dtype=torch.int32)
    return logits, tokens, lengths // 2, lengths


def penalize(
    logits: torch.Tensor, tokens: torch.Tensor, prompt: torch.Tensor, lengths: torch.Tensor, **on: float
) -> Any:
    rows = logits.shape[0]
    every = torch.arange(rows, dtype=torch.int32)
    columns = (
        torch.full((rows,), on.get(f"{name}_penalty", off))
        for name, off in (("repetition", 1.0), ("frequency", 0.0), ("presence", 0.0))
    )
    op = reference.penalize({"vocab": VOCABULARY}, lambda *_, **__: pytest.fail("it is a primitive"))
    return op(logits.clone(), tokens, every, prompt, lengths, LENGTH, *columns)


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("seed", range(5))
def test_penalized_logits_equal_plain_python_bit_for_bit(kind: str, seed: int) -> None:
    logits, tokens, prompt, lengths = state(seed)
    found = penalize(logits, tokens, prompt, lengths, **PENALTIES[kind])
    for row in range(len(logits)):
        ids = tokens[row, : lengths[row]].tolist()
        message = NewRequest(id="r", prompt=ids[: prompt[row]], max_tokens=1, sampling=greedy(**PENALTIES[kind]))
        assert torch.equal(found[row], adjusted(message)(ids[prompt[row] :], logits[row].clone()))


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.8])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, tokens, prompt, lengths = state(21)
    found = penalize(logits, tokens, prompt, lengths, repetition_penalty=penalty)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(len(logits)):
        ids = tokens[row : row + 1, : lengths[row]].long()
        assert torch.equal(found[row], theirs(ids, logits[row : row + 1].clone())[0])


def add_bias(logits: torch.Tensor, entries: list[tuple[int, float, int]], position: int) -> torch.Tensor:
    ids, values, until = (list(column) for column in zip(*entries, strict=True))
    op = reference.add_bias({"vocab": VOCABULARY}, lambda *_, **__: pytest.fail("it is a primitive"))
    integers = [torch.tensor([column], dtype=torch.int32) for column in (ids, until)]
    found: torch.Tensor = op(
        logits.clone(), integers[0], torch.tensor([values]), integers[1], torch.tensor([position], dtype=torch.int32)
    )
    return found


def test_logit_bias_and_min_tokens_match_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor, SequenceBiasLogitsProcessor

    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 5
    ids = torch.arange(10)[None]
    bias = {4: 2.5, 60: -100.0, 96: 0.125}
    theirs = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    assert torch.equal(
        add_bias(logits, [(token, value, 99) for token, value in bias.items()], 10), theirs(ids, logits.clone())
    )
    barred = MinNewTokensLengthLogitsProcessor(6, 5, [7, 8], device="cpu")
    for length in range(6, 13):
        entries = [(token, -math.inf, 6 + 5) for token in (7, 8)]
        theirs_now = barred(torch.zeros(1, length, dtype=torch.long), logits.clone())
        assert torch.equal(add_bias(logits, entries, length), theirs_now), length
