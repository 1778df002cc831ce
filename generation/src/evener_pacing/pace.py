"""How many tokens a step of a server may have.

A running answer gets one token a step. With nothing else to compute, that takes as long as a decode step. The prompt
tokens of other requests come on top. With few of them in a step, the wait is short, but a step's fixed time is paid
more often, so fewer prompts a second can be computed. ``PacedSteps`` makes steps as short as prompts allow:

- The *pace* says how many times a decode step a step with prompts may take. At ``ratio``, its least, such a step does
  no harm, and ``1 - 1 / ratio`` of the time is for prompts.
- If that is too little, there are more and more steps with prompts. The pace grows when more than the share ``FILLED``
  of the steps is full, and falls when it is less. So it finds the shortest steps that keep up. At that pace most steps
  have prompts: the usual step is such a step, and a token that waits for one waits no longer than usual. A larger pace
  would only make a few steps long among many short ones.
- The pace changes slowly, and not with each prompt that comes, because steps of changing lengths are what makes answers
  uneven. It changes faster while what waits takes longer than ``PATIENCE``.
- More prompts may come than can be computed at all. Then steps grow until larger ones would hardly be faster, see
  ``ENOUGH``. They take at most ``target`` seconds. A step that holds up no answer takes that.

With prompts for a share s of the time, if nothing else had to be computed, and decode steps of d seconds, the pace is
about 1 + s / (FILLED * (1 - s)), and a step takes that times d.

How long a step takes is estimated from the steps before, see ``costs``. Steps grow from small ones, at most twofold,
because nothing is known about larger ones. Prompts always go on: a step has at least ``LEAST_TOKENS`` of theirs, and
they get half of its other time.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.config.schema import Config
from evener.contracts.generation.drafts import DecodingRequest
from evener.engine.wire.plan import Plan
from evener.errors import ConfigError
from evener_pacing.chosen import chosen
from evener_pacing.costs import StepCosts, StepWork
from evener_pacing.timed_executor import TimedLimit

#: Prompt tokens that a step may always have.
LEAST_TOKENS = 32
#: Prompt tokens of the largest step while no larger one was seen.
FIRST_TOKENS = 128
#: The share of the steps that are full of prompt tokens at the pace that is looked for.
FILLED = 0.8
#: How much of the pace one step changes.
GAIN = 0.006
#: Seconds of work that may wait; with more, the pace changes faster, up to ``HASTE`` times.
PATIENCE = 1.0
HASTE = 5.0
#: Steps do not grow beyond this share of the prompt tokens a second of a whole budget.
ENOUGH = 0.97
#: Large steps are multiples of this number of tokens, which fits the tiles of most matrix kernels.
_UNIT = 64


def paced_steps(config: Config, max_reqs: int) -> PacedSteps | None:
    """The limit on a server's steps; None if another one is chosen. A token passes through all pipeline stages, so each
    has its share of the target. ``max_reqs``: that many requests run at most; a step counts those that do.

    Raises:
        ConfigError: ``generation.step_ratio`` leaves no time for prompts.
    """
    if chosen(config) != "pace":
        return None
    ratio = config.options.get("generation", {}).get("step_ratio", 2.0)
    if not ratio > 1:
        raise ConfigError(f"generation.step_ratio={ratio:g} leaves prompts no time; set it above 1, such as 2")
    return PacedSteps(config.infer.step_target / config.infer.pp_size, ratio)


class PacedSteps(TimedLimit):
    """Limits steps so that answers go on evenly while prompts keep up.

    Args:
        target: seconds that a step takes at most.
        ratio: how many times a decode step a step with prompts may take, even if shorter ones would keep up.

    Attributes:
        costs: what steps cost.
        pace: how many times a decode step a step with prompts may take now.
    """

    def __init__(self, target: float, ratio: float) -> None:
        self._target, self._ratio = target, ratio
        self.costs, self.pace = StepCosts(), ratio
        self._largest = FIRST_TOKENS

    def allowed(self, most: int, running: Sequence[DecodingRequest], waiting: Sequence[DecodingRequest]) -> int:
        context = decoding = backlog = start = 0
        for request in running:
            missing = request.length - request.computed
            if missing <= 1:
                context, decoding = context + request.computed, decoding + 1
            else:
                start, backlog = max(start, request.computed), backlog + missing
        backlog += sum(request.length for request in waiting)
        wanted = self._wanted(most, context, decoding, start, backlog)
        if not backlog:
            return most
        tokens = decoding + int(min(wanted, 2 * self._largest))
        return min(most, tokens if tokens < 2 * _UNIT else max(decoding + LEAST_TOKENS, tokens // _UNIT * _UNIT))

    def _wanted(self, most: int, context: int, decoding: int, start: int, backlog: int) -> float:
        """Prompt tokens of a step that begin at ``start``, if ``backlog`` of them wait."""
        costs = self.costs
        longest = costs.tokens(self._target, context, start)
        if not decoding:
            return max(LEAST_TOKENS, longest)
        alone = costs.decode(context)
        longest = min(longest, self._enough(most, context, start))
        even = costs.tokens(self.pace * alone, context, start)
        least = costs.tokens(1.5 * costs.started(context), context, start)
        wanted = max(LEAST_TOKENS, least, min(even, longest))
        steps = backlog / wanted
        if even < longest or steps < FILLED:
            waits = backlog * costs.token(start, wanted) + steps * costs.started(context)
            gain = GAIN * min(HASTE, max(1.0, waits / PATIENCE))
            # Below what a step takes at least, the pace would change and nothing with it.
            lowest = max(self._ratio, 1.5 * costs.started(context) / alone) if alone else self._ratio
            self.pace = max(lowest, self.pace * (1 + gain * (min(1.0, steps) - FILLED)))
        return wanted

    def _enough(self, most: int, context: int, start: int) -> float:
        """Prompt tokens of a step that computes nearly as many a second as one with ``most``."""
        fixed = self.costs.started(context)
        rest = fixed + (1 - ENOUGH) * self.costs.token(start, most) * most
        return ENOUGH * most * fixed / rest if rest else most

    def record(self, plan: Plan, seconds: float) -> None:
        work = StepWork.of(plan)
        self.costs.record(work, seconds)
        self._largest = max(self._largest, work.tokens)
