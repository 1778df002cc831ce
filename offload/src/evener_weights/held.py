"""The weights that the workers hold: which, and whether any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import Command, CommandDone, FromController
from evener.errors import EngineDeadError, EngineError

if TYPE_CHECKING:
    from evener.engine.controller.controller import Controller


class HeldWeights:
    """Changes the weights of all workers together.

    Attributes:
        folder: where they are from; "": the model as it was started.
        asleep: they were released.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.folder, self.asleep = "", False

    def run(self, controller: Controller, order: Command) -> list[FromController]:
        """Requests that are still open end with an error; then the workers do ``order``, which must be no ``check``."""
        scheduler = controller.scheduler
        events = scheduler.end_all("error", "the weights were changed before this request ended; send it again")
        while scheduler.in_flight and not controller.dead:
            events += controller.step()
        try:
            error = controller.dead or self.change(*order.arguments)
        except EngineError as failed:
            return [*events, *controller.die(str(failed)), CommandDone(str(failed))]
        controller.paused = "the engine is asleep, without weights: wake it up first" if self.asleep else None
        # Cached blocks belong to the old weights.
        scheduler.state.pool.clear_keys()
        return [*events, CommandDone(error)]

    def change(self, action: str, folder: str) -> str | None:
        """``release`` or ``load``. Returns why nothing has changed.

        Raises:
            EngineDeadError: a worker has died, or has no weights any more.
        """
        if action == "release":
            error = self._command("release")
            self.asleep = self.asleep or error is None
            return error
        folder = folder or self.folder
        if (error := self._command("check", folder)) is not None:
            return error
        if (error := self._command("load", folder)) is None:
            self.folder, self.asleep = folder, False
            return None
        # Some workers may have the new ones, others none.
        second = self._command("release") if self.asleep else self._command("load", self.folder)
        if second is not None:
            raise EngineDeadError(f"the weights could not be loaded ({error}), nor those from before ({second})")
        return error

    def _command(self, action: str, folder: str = "") -> str | None:
        """Why a worker could not."""
        answers = self._executor.command(Command("weights", [action, folder]))
        return next((answer.error for answer in answers if answer.error is not None), None)
