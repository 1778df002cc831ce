"""The time of an engine's steps on synthetic prompts: prefill of a batch, and the decode steps after it."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass

from evener.contracts.media import MediaPrompt
from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import FromController, ToController, Tokens
from evener.llm import LLM
from evener.sampling_params import SamplingParams


@dataclass(frozen=True)
class Load:
    """A synthetic batch: so many requests, tokens of each prompt, and decode steps of all of them."""

    requests: int
    prompt: int
    steps: int

    def new_tokens(self, step_tokens: int) -> int:
        """Tokens that each request generates, so that ``steps`` steps have all requests: the first ones begin while the
        last prompts are still computed, in steps of ``step_tokens`` tokens."""
        return self.steps + 2 + -(-self.requests * self.prompt // step_tokens)


@dataclass(frozen=True)
class StepTimes:
    """Seconds: of the prefill of the whole batch, and of single decode steps."""

    prefill: float
    decode: tuple[float, ...]


class TimedClient(EngineClient):
    """An engine's client that notes when tokens came.

    Attributes:
        arrivals: (``time.perf_counter()``, number of requests with new tokens) of each ``receive`` that had any.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.arrivals: list[tuple[float, int]] = []

    def send(self, message: ToController) -> None:
        self._client.send(message)

    def receive(self, timeout: float | None) -> list[FromController]:
        events = self._client.receive(timeout)
        with_ids = {event.id for event in events if isinstance(event, Tokens) and event.ids}
        if with_ids:
            self.arrivals.append((time.perf_counter(), len(with_ids)))
        return events

    def close(self, drain: bool = False) -> None:
        self._client.close(drain)


def time_steps(llm: LLM, client: TimedClient, load: Load, new_tokens: int, seed: int) -> StepTimes:
    """Run ``load`` once for its prefill alone, and once for its decode steps.

    Args:
        llm: over ``client``.
        new_tokens: of each request, see ``Load.new_tokens``.
        seed: of the prompts; another one for each call, so that no prompt is in the prefix cache.
    """
    draw = random.Random(seed)

    def generate(count: int) -> float:
        prompts: list[str | list[int] | MediaPrompt] = [
            draw.choices(range(llm.info.vocab_size), k=load.prompt) for _ in range(load.requests)
        ]
        client.arrivals.clear()
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False))
        return began

    began = generate(1)
    prefill = client.arrivals[-1][0] - began
    generate(new_tokens)
    # The first step of all requests ends when the last prompt does; after it, each interval is one step.
    whole = [at for at, count in client.arrivals if count == load.requests]
    times = [after - before for before, after in itertools.pairwise(whole)]
    return StepTimes(prefill, tuple(times[-load.steps :]))
