"""Steps that take a target time, from the times of the steps before.

From the tokens and seconds of each step that was read, ``MeasuredSteps`` computes how many tokens would have taken the
target if time were proportional to tokens.

- A step takes time besides that of its tokens, so this estimate is too large after a slow step and too small after a
  fast one. But it moves towards the right number, and at that number it stays.
- The estimate depends on the step that was read alone, not on the current limit. So it does not matter how many plans
  were made in the meantime.
- The limit starts low and at most doubles from one step to the next: nothing is known about larger steps. A step that
  was slow for another reason, such as a kernel that was compiled, costs a few small steps.
- Only steps that are large enough can raise the limit: a decode step says little about a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.config.schema import Config
from evener.contracts.generation.drafts import DecodingRequest
from evener.engine.wire.plan import Plan
from evener_pacing.chosen import chosen
from evener_pacing.timed_executor import TimedLimit

#: Tokens of a step that is always allowed: with fewer, reading the weights would cost more time than computing.
LEAST_TOKENS = 128
#: Limits are multiples of this number, which fits the tiles of most matrix kernels.
_UNIT = 64


def measured_steps(config: Config, max_reqs: int) -> MeasuredSteps | None:
    """The limit on the steps of a server that runs ``max_reqs`` requests at once; None if another one is chosen. A
    token passes through all pipeline stages, so each has its share of the target."""
    if chosen(config) != "measured":
        return None
    return MeasuredSteps(config.infer.step_target / config.infer.pp_size, max_reqs)


class MeasuredSteps(TimedLimit):
    """Limits steps to what is computed in a target time.

    Args:
        target: seconds.
        least: tokens that are allowed however slow a step is: one for each running request at least, so that none is
            left out.
    """

    def __init__(self, target: float, least: int) -> None:
        self._target, self._least = target, max(least, LEAST_TOKENS)
        self._tokens = float(self._least)

    def allowed(self, most: int, running: Sequence[DecodingRequest], waiting: Sequence[DecodingRequest]) -> int:
        return min(most, max(self._least, int(self._tokens) // _UNIT * _UNIT))

    def record(self, plan: Plan, seconds: float) -> None:
        tokens = sum(plan.counts)
        if seconds > self._target:
            self._tokens = max(self._least, min(self._tokens, tokens * self._target / seconds))
        else:
            within = 2 * tokens if 2 * seconds <= self._target else tokens * self._target / seconds
            self._tokens = max(self._tokens, within)
