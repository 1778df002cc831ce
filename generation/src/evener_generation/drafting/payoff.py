"""Whether drafts pay: they cost time where a step is busy with many requests, or where few of them are right."""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the newest step in the averages.
_NEWEST = 0.1
#: Steps that are measured in each of the two ways before they are compared.
_FIRST = 8
#: After so many steps in one way, ``_TRIAL`` steps are taken in the other: load and texts change.
_REPEAT, _TRIAL = 128, 4


@dataclass
class _Rate:
    """Averages over steps."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        weight = max(_NEWEST, 1 / (self.steps + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.steps += 1

    @property
    def value(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)


class Payoff:
    """Compares decode steps with drafts and without, for each range of numbers of requests (a power of two to the
    next), by the tokens that they make in a second. So which steps have drafts differs from run to run."""

    def __init__(self) -> None:
        self._rates: dict[tuple[int, bool], _Rate] = {}
        self._since: dict[int, int] = {}

    def record(self, requests: int, drafted: bool, tokens: int, seconds: float) -> None:
        """A decode step of so many requests, with drafts or without, made ``tokens`` tokens in ``seconds``."""
        self._rate(requests, drafted).record(tokens, seconds)
        self._since[requests.bit_length()] = self._since.get(requests.bit_length(), 0) + 1

    def pays(self, requests: int) -> bool:
        """Whether the next decode step of so many requests should have drafts."""
        with_drafts, without = self._rate(requests, True), self._rate(requests, False)
        if with_drafts.steps < _FIRST or without.steps < _FIRST:
            return with_drafts.steps < _FIRST
        better = with_drafts.value > without.value
        steps = self._since.get(requests.bit_length(), 0) % (_REPEAT + _TRIAL)
        return better != (steps >= _REPEAT)

    def _rate(self, requests: int, drafted: bool) -> _Rate:
        return self._rates.setdefault((requests.bit_length(), drafted), _Rate())
