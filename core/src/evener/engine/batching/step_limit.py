"""How many tokens a step may have.

A running answer gets one token a step, so it waits as long as a step takes, and that grows with the prompt tokens that
the step computes beside it. An installed package may limit them, by the times of earlier steps: see
``Descriptor.step_limits``.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.generation.drafts import DecodingRequest
from evener.engine.wire.plan import Plan


class StepLimit:
    """Allows the whole token budget in every step. Results are then the same in every run. The scheduler asks before
    each step, so others must be quick."""

    def allowed(self, most: int, running: Sequence[DecodingRequest], waiting: Sequence[DecodingRequest]) -> int:
        """How many tokens the next step may have, if its budget is ``most``: one for each of the ``running`` requests
        at least, so that none is left out. ``waiting`` ones start in the rest, in another order."""
        return most

    def record(self, plan: Plan, seconds: float) -> None:
        """A step has taken ``seconds``. Steps with media are left out: encoding has a budget of its own."""
