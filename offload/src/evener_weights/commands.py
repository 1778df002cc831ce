"""The commands ``weights``: see ``evener.engine.wire.installed``. Their arguments are an action (``check`` whether the
weights of a folder fit, ``load`` them, or ``release`` weights and state) and a folder; "": the model as it was started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.engine.wire.messages import Command, FromController
from evener_weights.held import HeldWeights

if TYPE_CHECKING:
    from evener.async_llm import AsyncLLM
    from evener.engine.controller.controller import Controller
    from evener.engine.sampling.pending import PendingStep
    from evener.engine.worker.worker import Worker
    from evener.llm import LLM
    from evener_weights.fronts import AsyncFront, Front


class WeightCommands:
    """Finds the halves."""

    @staticmethod
    def front(llm: LLM) -> Front:
        """The methods that ``llm`` gets."""
        from evener_weights.fronts import Front

        return Front(llm)

    @staticmethod
    def async_front(llm: AsyncLLM) -> AsyncFront:
        """The methods that ``llm`` gets."""
        from evener_weights.fronts import AsyncFront

        return AsyncFront(llm)

    @staticmethod
    def run(controller: Controller, order: Command) -> list[FromController]:
        """End the requests, then do ``order`` on all workers."""
        held: HeldWeights = controller.commands.setdefault(order.name, HeldWeights(controller.executor))
        return held.run(controller, order)

    @staticmethod
    def execute(worker: Worker, order: Command) -> PendingStep:
        """Do ``order`` on a rank."""
        from evener_weights.ranks import Answer, change  # imports torch, which a controller may not need

        return Answer(change(worker, *order.arguments))
