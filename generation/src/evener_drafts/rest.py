"""When what follows each of the model's tokens rests: once nobody has asked for drafts for a while."""

from __future__ import annotations

from evener.engine.wire.plan import Plan

#: So many plans that sample may have no drafts before a draft model rests that can compute later what it has missed.
#: Steps without drafts are measured without it: the first few of them take no part in that.
SHORT = 2
#: The same for what cannot. A request has no drafts for up to 32 tokens after wrong ones, and about a dozen steps
#: without drafts are compared with those that have some.
LONG = 128


class Rest:
    """Counts plans without drafts. All ranks get the same plans, so that they rest alike.

    Args:
        patience: how many there may be.
    """

    def __init__(self, patience: int) -> None:
        self._patience, self._without = patience, 0

    def ends(self, plan: Plan) -> bool:
        """Whether this plan's tokens are followed."""
        self._without = 0 if plan.drafts else self._without + (bool(plan.samples) and plan.id >= 0)
        return self._without <= self._patience
