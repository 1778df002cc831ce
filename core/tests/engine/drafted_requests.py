"""Requests of three kinds for engines with drafts, for a vocabulary of at least 10 ids."""

from __future__ import annotations

from evener.engine.wire.messages import NewRequest, Sampling


def requests(answer: int = 24) -> list[NewRequest]:
    """Greedy, sampled, and greedy with log-probabilities; answers of ``answer`` tokens and one or two more."""
    asked = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=5), Sampling(temperature=0.0, logprobs=1)]
    return [
        NewRequest(id=f"r{at}", prompt=[1 + (at + i * i) % 9 for i in range(9 + 13 * at)], max_tokens=answer + at,
                   sampling=sampling)
        for at, sampling in enumerate(asked)
    ]  # fmt: skip
