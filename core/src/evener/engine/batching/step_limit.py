"""How many tokens a step may have.

A running request gets one token a step, so the time between its tokens grows with the prompt tokens that the same step
computes. An installed package may limit these, by the times of earlier steps: see ``Descriptor.step_limits``.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.config.schema import Config
from evener.contracts.generation.drafts import DecodingRequest
from evener.engine.wire.executor import Executor
from evener.plugins.discover import installed_catalog


class StepLimit:
    """Allows the whole token budget in every step, which makes the steps the same in every run. The scheduler asks
    before each step, so the class of a package must be quick."""

    def allowed(self, most: int, running: Sequence[DecodingRequest], waiting: Sequence[DecodingRequest]) -> int:
        """How many tokens the next step may have, at most ``most`` and at least one for each of the ``running``
        requests, so that none is left out. The ``waiting`` ones are not in the order in which they start."""
        return most

    def wrap(self, executor: Executor) -> Executor:
        """The executor that the controller uses in place of ``executor``, such as one that measures its steps.
        (optional; default: the same)"""
        return executor


def limit_steps(config: Config, max_reqs: int, streaming: bool) -> StepLimit:
    """The limit on a run's steps. It is that of an installed package if answers are ``streaming``, the token budget is
    ``auto`` and there is a target; otherwise a step has the whole budget."""
    if not streaming or config.infer.step_tokens != "auto" or config.infer.step_target == 0:
        return StepLimit()
    return next(installed_catalog().answers("step limit", config, max_reqs), StepLimit())
