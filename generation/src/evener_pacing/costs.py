"""What a step costs, learnt from the steps before.

A step takes about

    fixed + read * context + mixed + token * tokens + attend * pairs    seconds

``context`` is the number of tokens whose state is read for rows of one token, ``tokens`` the number of prompt tokens,
and ``pairs`` the number of pairs of a prompt token and one that it attends to. ``mixed`` counts only if there are
prompt tokens: such steps may not be captured as a graph. The five costs are fitted by least squares. They are never
negative: coordinate descent sets each in turn to its best value of at least 0 while the others stay, and goes on from
the last costs after each step (as for non-negative least squares in Franc, Hlavac and Navara, 2005).

- What counts is the relative error, as small steps matter as much as large ones. So a step that was slow for another
  reason, such as a kernel that was compiled, says little.
- Steps with and without prompt tokens are remembered apart and count the same. Thousands of decode steps do not make a
  prompt's cost forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from evener.engine.wire.plan import Plan

#: What a step adds to what was remembered of its kind.
_NEW = 0.02
#: How often each cost is improved after a step.
_SWEEPS = 6


@dataclass(frozen=True)
class StepWork:
    """The work of a step.

    Attributes:
        context: tokens whose state is read for rows of one token.
        decoding: rows of one token, and rows with drafts.
        tokens: prompt tokens and drafts.
        pairs: pairs of a prompt token and one that it attends to.
    """

    context: int
    decoding: int
    tokens: int
    pairs: float

    @classmethod
    def of(cls, plan: Plan) -> StepWork:
        """The work of a plan."""
        drafted = {each.row for each in plan.drafts}
        context = decoding = tokens = 0
        pairs = 0.0
        for row, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            if count == 1 or row in drafted:
                context, decoding, tokens = context + start, decoding + 1, tokens + count - 1
            else:
                tokens, pairs = tokens + count, pairs + count * (start + count / 2)
        return cls(context, decoding, tokens, pairs)

    def terms(self) -> list[float]:
        """What each cost is multiplied by: token, fixed, read, attend, mixed. With one step alone, all of its seconds
        would be those of the first."""
        return [self.tokens, 1.0, self.context, self.pairs, float(self.tokens > 0)]


@dataclass
class _Moments:
    """Running means of the products of terms, and of terms and seconds, all divided by the seconds squared."""

    squares: list[list[float]] = field(default_factory=lambda: [[0.0] * 5 for _ in range(5)])
    targets: list[float] = field(default_factory=lambda: [0.0] * 5)
    weight: float = 0.0

    def add(self, terms: list[float], seconds: float) -> None:
        scaled = [each / seconds for each in terms]
        self.weight += _NEW * (1 - self.weight)
        for row, mine in zip(self.squares, scaled, strict=True):
            row[:] = [old + _NEW * (mine * other - old) for old, other in zip(row, scaled, strict=True)]
        self.targets = [old + _NEW * (mine - old) for old, mine in zip(self.targets, scaled, strict=True)]


class StepCosts:
    """The costs of steps, in seconds."""

    def __init__(self) -> None:
        self._costs = [0.0] * 5
        self._kinds = (_Moments(), _Moments())

    def record(self, work: StepWork, seconds: float) -> None:
        """A step with this work has taken ``seconds``."""
        if seconds <= 0:
            return
        self._kinds[work.tokens > 0].add(work.terms(), seconds)
        known = [(each, 1 / each.weight) for each in self._kinds if each.weight]
        squares = [[sum(m.squares[i][j] * w for m, w in known) for j in range(5)] for i in range(5)]
        targets = [sum(m.targets[i] * w for m, w in known) for i in range(5)]
        costs = self._costs
        for _ in range(_SWEEPS):
            for i, row in enumerate(squares):
                if row[i] > 0:
                    others = sum(a * b for a, b in zip(row, costs, strict=True)) - row[i] * costs[i]
                    costs[i] = max(0.0, (targets[i] - others) / row[i])

    def decode(self, context: int) -> float:
        """Seconds of a step without prompt tokens that reads the state of ``context`` tokens."""
        return self._costs[1] + self._costs[2] * context

    def started(self, context: int) -> float:
        """Seconds of such a step besides what each of its prompt tokens takes."""
        return self.decode(context) + self._costs[4]

    def token(self, start: int, count: float) -> float:
        """Seconds of each of ``count`` prompt tokens from position ``start`` on."""
        return self._costs[0] + self._costs[3] * (start + count / 2)

    def tokens(self, seconds: float, context: int, start: int) -> float:
        """How many prompt tokens from position ``start`` on make a step take ``seconds``; unlimited while nothing is
        known."""
        # The positive solution of count * token(start, count) = left, in a form that also holds without attention.
        left, first, more = max(0.0, seconds - self.started(context)), self.token(start, 0.0), self._costs[3]
        if not (first or more):
            return float("inf")
        divisor = first + sqrt(first * first + 2 * more * left)
        return 2 * left / divisor if divisor else 0.0
