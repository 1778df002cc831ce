"""The child processes: ``python -m evener.engine.child worker|controller ADDRESS LOG_LEVEL``, by ``process.Child``."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from evener.config import from_overrides
from evener.config.schema import Config
from evener.engine.loop import run_controller
from evener.engine.messages import FromController, ToController
from evener.engine.plan import Plan
from evener.engine.process import Failed, Parent, read_config
from evener.engine.search import Search
from evener.errors import EvenerError
from evener.logs import set_up_logging

if TYPE_CHECKING:
    from evener.engine.worker import PendingStep

_ENCODER = msgspec.msgpack.Encoder()


def run_worker(config: Config, parent: Parent) -> None:
    """Run plans as they come; results go back in order, as soon as each is there."""
    search = Search(config.backend)
    from evener.engine.worker import Worker  # imports torch, beside the probes

    worker = Worker(config, search, serving=True)
    parent.send(_ENCODER.encode(worker.facts))
    decoder = msgspec.msgpack.Decoder(Plan)
    pending: deque[PendingStep] = deque()
    while True:
        # What is there goes out before the next plan is begun: on a device that computes within ``execute``, the
        # controller works on it meanwhile.
        while pending and pending[0].ready():
            parent.send(_ENCODER.encode(pending.popleft().wait()))
        # While a result is under way, take a further plan only if it is here already, so that the device stays busy.
        data = parent.receive(0 if pending else None)
        if data is not None:
            pending.append(worker.execute(decoder.decode(data)))
        elif pending:
            parent.send(_ENCODER.encode(pending.popleft().wait()))


class _Channel:
    """The controller's mailbox over its channel to the front end."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._decoder = msgspec.msgpack.Decoder(ToController)

    def take(self, timeout: float) -> list[ToController]:
        messages: list[ToController] = []
        data = self._parent.receive(timeout)
        while data is not None:
            messages.append(self._decoder.decode(data))
            data = self._parent.receive(0)
        return messages

    def put(self, events: Sequence[FromController]) -> None:
        self._parent.send(_ENCODER.encode(list(events)))


def run_controller_process(config: Config, parent: Parent) -> None:
    """Serve one front end until it says stop."""
    from evener.engine.start import build_controller

    controller, ready = build_controller(config, serving=True)
    channel = _Channel(parent)
    channel.put([ready])
    run_controller(controller, channel)
    controller.executor.close()


ROLES: dict[str, Callable[[Config, Parent], None]] = {"worker": run_worker, "controller": run_controller_process}


def main(argv: list[str]) -> int:
    """Run one role; an error at start goes to the parent with its class and message."""
    role, address, level = argv
    flat = read_config(address)
    parent = Parent(address)
    try:
        config = from_overrides(flat.pop("model"), flat)
        set_up_logging(config.log, int(level))
        ROLES[role](config, parent)
    except EvenerError as error:
        parent.send(_ENCODER.encode(Failed(type(error).__name__, str(error))))
        return 1
    finally:
        parent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
