"""The command ``forks``: see ``evener.engine.wire.installed``. Its arguments are an action and the id of a search:
``open`` before its first request, ``end`` after its last. The workers have no part in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.engine.wire.messages import Command, CommandDone, FromController
from evener_forks.kept import KeptStates

if TYPE_CHECKING:
    from evener.engine.controller.controller import Controller


class ForkCommands:
    """The controller's half."""

    @staticmethod
    def run(controller: Controller, order: Command) -> list[FromController]:
        """Keep states from now on, or release those of a search."""
        if order.name not in controller.commands:
            controller.commands[order.name] = KeptStates(controller.scheduler)
            controller.commands[order.name].install()
        action, search = order.arguments
        if action == "end":
            controller.commands[order.name].end(search)
        return [CommandDone()]
