"""Comparing an engine with an oracle, by the rule for "equal" greedy text (design §8).

Greedy tokens are equal if each has the largest of the oracle's logits after the same tokens: one teacher-forced pass of
the oracle over prompt and answer shows it. Where a token differs, the oracle's two largest logits must be closer than
``TIE``; the comparison then resumes from the oracle's token. Ties are counted, and too many are a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import Finished, NewRequest, Sampling, Tokens
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.engine.worker.worker import Worker

TIE = 1e-4
TIES_PER_TOKEN = 2 / 1000

#: From token ids [n] to logits [n, vocab] of float32, or to their last rows, as many as the answer has tokens.
Oracle = Callable[[Sequence[int]], torch.Tensor]


@dataclass
class Comparison:
    """Totals of a comparison; ``ties`` lists (request, position, gap)."""

    tokens: int = 0
    ties: list[tuple[int, int, float]] = field(default_factory=list)

    def check(self) -> None:
        """Raise ``AssertionError`` if there are too many ties."""
        allowed = max(1, int(self.tokens * TIES_PER_TOKEN))
        assert len(self.ties) <= allowed, f"{len(self.ties)} ties in {self.tokens} tokens: {self.ties}"


def generate(
    client: EngineClient, prompts: Sequence[Sequence[int]], count: int, every: int = 0, tag: str = ""
) -> list[list[int]]:
    """Greedy answers of ``count`` tokens. Prompts are sent at once; with ``every``, one after each ``every`` events."""
    answers: dict[str, list[int]] = {f"{tag}{i}": [] for i in range(len(prompts))}
    waiting: Iterator[tuple[int, Sequence[int]]] = iter(enumerate(prompts))

    def send(number: int) -> None:
        for _, (i, prompt) in zip(range(number), waiting, strict=False):
            client.send(
                NewRequest(id=f"{tag}{i}", prompt=list(prompt), max_tokens=count, sampling=Sampling(temperature=0.0))
            )

    send(1 if every else len(prompts))
    seen = ended = 0
    while ended < len(prompts):
        events = client.receive(None)
        for event in events:
            if isinstance(event, Tokens) and event.id in answers:
                answers[event.id].extend(event.ids)
                seen += 1
                if every and seen % every == 0:
                    send(1)
            elif isinstance(event, Finished):
                assert event.reason == "length", f"{event.id} ended with {event.reason}: {event.error}"
                ended += 1
        if not events:
            send(1)
    return list(answers.values())


def teacher_forced(worker: Worker, ids: Sequence[int]) -> torch.Tensor:
    """Logits float32 [n, vocab] after each of ``ids``, in one step on the worker's first slot. No other request may be
    running."""
    geometry = worker.assembly.geometry
    columns = -(-len(ids) // geometry.block_size)
    groups = len(geometry.groups)
    blocks = [[1 + g * columns + c for c in range(columns)] for g in range(groups)]
    plan = Plan(
        id=-1, admissions=[Admission(0, list(ids), Sampling())], updates=[TableUpdate(0, 0, blocks)],
        slots=[0], starts=[0], counts=[len(ids)],
    )  # fmt: skip
    with torch.inference_mode():
        hidden, step, _ = worker.runner.forward(plan)
        return worker.runner.logits(hidden, step).float()


def compare_greedy(
    oracle: Oracle, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]],
    resume: Callable[[Sequence[int], int], Sequence[int]], result: Comparison, tie: float = TIE,
) -> None:  # fmt: skip
    """Check every answer against the oracle.

    Args:
        resume: gives the engine's greedy answer of ``count`` tokens to a prompt; called after a tie.
        tie: largest gap between two logits whose order may depend on rounding.

    Raises:
        AssertionError: a token differs and its logit is more than ``tie`` below the oracle's largest.
    """
    for index, (prompt, whole) in enumerate(zip(prompts, answers, strict=True)):
        tokens, answer = list(prompt), list(whole)
        while answer:
            logits = oracle(tokens + answer[:-1])[-len(answer) :]
            wrong = (logits.argmax(-1) != torch.tensor(answer)).nonzero().flatten().tolist()
            if not wrong:
                result.tokens += len(answer)
                break
            at = wrong[0]
            best = logits[at].topk(2)
            gap = float(best.values[0] - best.values[1])
            assert gap < tie, (
                f"prompt {index}, token {len(tokens) + at}: {answer[at]} instead of {int(best.indices[0])}, "
                f"which the oracle prefers by {gap:.3g} over {int(best.indices[1])}"
            )
            result.ties.append((index, len(tokens) + at, gap))
            result.tokens += at + 1
            left = len(answer) - at - 1
            tokens += [*answer[:at], int(best.indices[0])]
            answer = list(resume(tokens, left)) if left else []
