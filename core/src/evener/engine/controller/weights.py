"""The weights that the workers hold: which, and whether any."""

from __future__ import annotations

from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import ChangeWeights
from evener.errors import EngineDeadError


class HeldWeights:
    """Changes the weights of all workers together.

    Attributes:
        folder: where they are from; "": the model as it was started.
        asleep: they were released.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.folder, self.asleep = "", False

    def change(self, order: ChangeWeights) -> str | None:
        """Do ``order``, which must be no ``check``. Returns why nothing has changed.

        Raises:
            EngineDeadError: a worker has died, or has no weights any more.
        """
        change = self._executor.change_weights
        if order.action == "release":
            error = change(order)
            self.asleep = self.asleep or error is None
            return error
        folder = order.folder or self.folder
        if (error := change(ChangeWeights("check", folder))) is not None:
            return error
        if (error := change(ChangeWeights("load", folder))) is None:
            self.folder, self.asleep = folder, False
            return None
        # Some workers may have the new ones, others none.
        back = ChangeWeights("release") if self.asleep else ChangeWeights("load", self.folder)
        if (second := change(back)) is not None:
            raise EngineDeadError(f"the weights could not be loaded ({error}), nor those from before ({second})")
        return error
