"""How many tokens a step may have.

A running answer gets one token a step, so it waits as long as a step takes, and that grows with the prompt tokens that
the step computes beside it. An installed package may limit them, by the times of earlier steps: see
``Descriptor.step_limits``.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.config.schema import Config
from evener.contracts.generation.drafts import DecodingRequest
from evener.engine.wire.executor import Executor
from evener.plugins.discover import installed_catalog


class StepLimit:
    """Allows the whole token budget in every step. Results are then the same in every run. The scheduler asks before
    each step, so others must be quick."""

    def allowed(self, most: int, running: Sequence[DecodingRequest], waiting: Sequence[DecodingRequest]) -> int:
        """How many tokens the next step may have, if its budget is ``most``: one for each of the ``running`` requests
        at least, so that none is left out. ``waiting`` ones start in the rest, in another order."""
        return most

    def wrap(self, executor: Executor) -> Executor:
        """The executor that the controller uses in place of ``executor``, such as one that measures its steps.
        (optional; default: the same)"""
        return executor


def limit_steps(config: Config, max_reqs: int, streaming: bool) -> StepLimit:
    """The limit on a run's steps: that of an installed package, if answers are read while they are made, unless the
    configuration sets the token budget itself or has no target. Otherwise a step has the whole budget."""
    if not streaming or config.infer.step_tokens != "auto" or config.infer.step_target == 0:
        return StepLimit()
    return next(installed_catalog().answers("step limit", config, max_reqs), StepLimit())
