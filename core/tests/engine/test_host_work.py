"""Host work of a decode step: bounded, whatever the context and the vocabulary; nothing is looked up. And of a prompt
before its first step, which the device waits for."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import LogitBias, NewRequest, Sampling

GREEDY = Sampling(temperature=0.0)
RANDOM = Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=3, logprobs=4)
ADJUSTED = Sampling(temperature=0.8, seed=3, repetition_penalty=1.1, presence_penalty=0.5, bias=[LogitBias(5, 1.0)])
LOOKUPS = ("pluggy", "evener.plugins", "evener.resolution.resolver", "evener.contracts.hooks")


class Calls:
    """Counts Python and C calls by module and name while it is entered, without a garbage collection among them."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Calls:
        gc.disable()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.found[frame.f_globals.get("__name__", ""), f"{code.co_name}:{code.co_firstlineno}"] += 1
        elif event == "c_call":
            self.found[argument.__module__ or "", argument.__qualname__] += 1

    @property
    def modules(self) -> set[str]:
        return {module for module, _ in self.found}


def calls_of_a_block_period(controller: Controller, context: int, sampling: Sampling) -> Calls:
    """Calls of the decode steps that compute one block of tokens, with ``context`` tokens or a few more before them."""
    size = controller.scheduler.state.block_size
    controller.handle(
        [NewRequest(id="a", prompt=[i % 900 for i in range(context)], max_tokens=4 * size, sampling=sampling)]
    )
    (request,) = controller.scheduler.waiting
    while request.computed <= context or request.computed % size:
        controller.step()
    calls = Calls()
    with calls:
        for _ in range(size):
            controller.step()
    assert request.computed >= context + size and request.finish is None and request.computed % size == 0
    return calls


@pytest.fixture
def calls(make_config: Any) -> Any:
    def count(context: int, vocabulary: int, sampling: Sampling) -> Calls:
        shape = {"num_hidden_layers": 1, "vocab_size": vocabulary, "max_position_embeddings": 4200}
        limits = {"infer.max_seq_len": 4200, "infer.step_tokens": 256, "infer.max_reqs": 1, "infer.kv_memory": 2**24}
        controller, _ = build_controller(make_config("Llama", shape, **limits))
        return calls_of_a_block_period(controller, context, sampling)

    return count


@pytest.mark.parametrize(
    "sampling", [*(pytest.param(s, marks=pytest.mark.slow) for s in (GREEDY, RANDOM)), ADJUSTED],
    ids=["greedy", "random", "adjusted"],
)  # fmt: skip
def test_calls_of_a_decode_step_do_not_grow_with_the_context_or_the_vocabulary(calls: Any, sampling: Sampling) -> None:
    little = calls(100, 1000, sampling)
    assert little.found.total() > 100
    for context, vocabulary in ((4000, 1000), (100, 150_000)):
        other = calls(context, vocabulary, sampling)
        assert other.found == little.found, "these differ: " + str(
            {
                k: (little.found[k], other.found[k])
                for k in little.found | other.found
                if little.found[k] != other.found[k]
            }
        )


def test_a_decode_step_calls_no_registry_and_no_hook(calls: Any) -> None:
    seen = calls(100, 1000, RANDOM).modules
    assert "evener.engine.worker.runner" in seen and "evener.ops.composites" in seen, "the profile saw a step"
    assert not [m for m in seen if m.startswith(LOOKUPS)]


def test_calls_before_the_first_step_of_a_prompt_do_not_grow_with_its_length(make_config: Any) -> None:
    shape = {"num_hidden_layers": 1, "vocab_size": 1000, "max_position_embeddings": 4200}
    limits = {"infer.max_seq_len": 4200, "infer.step_tokens": 4096, "infer.max_reqs": 1, "infer.kv_memory": 2**24}

    def count(length: int) -> Calls:
        controller, _ = build_controller(make_config("Llama", shape, **limits, **{"infer.prefix_cache": False}))
        request = NewRequest(id="a", prompt=[i % 900 for i in range(length)], max_tokens=1, sampling=GREEDY)
        with (calls := Calls()):
            controller.handle([request])
            plan = controller.scheduler.schedule()
        assert plan is not None and plan.counts == [length]
        return calls

    assert count(4000).found == count(1000).found
