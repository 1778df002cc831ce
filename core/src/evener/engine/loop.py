"""The controller's loop, the same in a thread and in a process: messages in, one step, events out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evener.engine.controller import Controller
from evener.engine.messages import FromController, ToController

#: Seconds after which a quiet loop looks whether its worker still lives.
_HEARTBEAT = 0.25


class Mailbox(Protocol):
    """The controller's end of its channel to the front end."""

    def take(self, timeout: float) -> list[ToController]:
        """Messages so far, in order; waits up to ``timeout`` seconds for the first. 0 does not wait."""

    def put(self, events: Sequence[FromController]) -> None:
        """Hand events to the front end, in order."""


def run_controller(controller: Controller, mailbox: Mailbox) -> None:
    """Run until told to stop and nothing is open. A dead engine goes on answering that it is dead."""
    controller.executor.attach()
    while not (controller.stopping and (controller.idle or controller.dead)):
        idle = controller.idle or controller.dead is not None
        events = controller.handle(mailbox.take(_HEARTBEAT if idle else 0))
        events += controller.step() if not controller.idle else controller.check()
        if events:
            mailbox.put(events)
