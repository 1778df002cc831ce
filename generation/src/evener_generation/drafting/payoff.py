"""Whether drafts pay: they cost time where a step is busy with many requests, or where few of them are right."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Weight of the newest step in the averages, and that of one step of a try: what is known of the other way is old.
_NEWEST, _TRIED = 0.1, 0.3
#: Steps that are measured in each of the two ways before they are compared.
_FIRST = 8
#: After a pause of so many steps in one way, ``_TRIAL`` steps are taken in the other: load and texts change. A draft
#: model that has rested first computes what it lacks. So each try that changes nothing doubles the pause.
_SHORTEST, _LONGEST, _TRIAL = 128, 2048, 4


@dataclass
class _Rate:
    """Averages over steps."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def record(self, tokens: int, seconds: float, newest: float) -> None:
        weight = max(newest, 1 / (self.steps + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.steps += 1

    @property
    def value(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Load:
    """What is known of one range of numbers of requests.

    Attributes:
        better: the faster way: whether it has drafts.
        steps: those since that was decided, or the last try.
        pause: how many of them are before the next one.
    """

    drafted: _Rate = field(default_factory=_Rate)
    plain: _Rate = field(default_factory=_Rate)
    better: bool = False
    steps: int = 0
    pause: int = _SHORTEST

    @property
    def compared(self) -> bool:
        """Whether both ways were measured."""
        return min(self.drafted.steps, self.plain.steps) >= _FIRST

    @property
    def tries(self) -> bool:
        """Whether the next step is taken in the other way."""
        return self.steps >= self.pause

    def record(self, drafted: bool, tokens: int, seconds: float) -> None:
        """See ``Payoff.record``."""
        rate = self.drafted if drafted else self.plain
        rate.record(tokens, seconds, _TRIED if self.tries and drafted != self.better else _NEWEST)
        if not self.compared:
            return
        self.steps += 1
        if self.tries and self.steps < self.pause + _TRIAL:
            return
        better = self.drafted.value > self.plain.value
        if better != self.better:
            self.better, self.steps, self.pause = better, 0, _SHORTEST
        elif self.tries:
            self.steps, self.pause = 0, min(2 * self.pause, _LONGEST)


class Payoff:
    """Compares decode steps with drafts and without, for each range of numbers of requests (a power of two to the
    next), by the tokens that they make in a second. So which steps have drafts differs from run to run."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def record(self, requests: int, drafted: bool, tokens: int, seconds: float) -> None:
        """A decode step of so many requests, with drafts or without, made ``tokens`` tokens in ``seconds``."""
        self._load(requests).record(drafted, tokens, seconds)

    def pays(self, requests: int) -> bool:
        """Whether the next decode step of so many requests should have drafts."""
        load = self._load(requests)
        if not load.compared:
            return load.drafted.steps < _FIRST
        return load.better != load.tries

    def _load(self, requests: int) -> _Load:
        return self._loads.setdefault(requests.bit_length(), _Load())
