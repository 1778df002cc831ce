"""The child processes: ``python -m evener.engine.child worker|controller LOG_LEVEL``, by ``process.Process``."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from evener.config import from_overrides
from evener.config.schema import Config
from evener.distributed.hub import END, Link
from evener.distributed.launched import Contact, Launched
from evener.distributed.process import Failed, Parent, read_orders
from evener.distributed.world import Place
from evener.engine.loop import run_controller
from evener.engine.messages import FromController, ToController
from evener.engine.plan import Plan
from evener.errors import EngineError, EvenerError, PluginError
from evener.logs import set_up_logging
from evener.search import Search

if TYPE_CHECKING:
    from evener.engine.worker import PendingStep

log = logging.getLogger("evener.engine")
_ENCODER = msgspec.msgpack.Encoder()


def run_worker(config: Config, link: Link, place: Place) -> None:
    """Run plans as they come; results go back in order, as soon as each is there, from the rank that reports."""
    search = Search(config.backend)
    from evener.engine.worker import Worker  # imports torch, beside the probes

    worker = Worker(config, search, serving=True, ranks=place)
    link.send(_ENCODER.encode(worker.facts))
    decoder = msgspec.msgpack.Decoder(Plan)
    pending: deque[PendingStep] = deque()
    while True:
        # What is there goes out before the next plan is begun: on a device that computes within ``execute``, the
        # controller works on it meanwhile.
        while pending and pending[0].ready():
            link.send(_ENCODER.encode(pending.popleft().wait()))
        # While a result is under way, take a further plan only if it is here already, so that the device stays busy.
        data = link.receive(0 if pending else None)
        if data == END:
            return
        if data is not None:
            step = worker.execute(decoder.decode(data))
            if place.world.reports:
                pending.append(step)
        elif pending:
            link.send(_ENCODER.encode(pending.popleft().wait()))


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


def attempt(end: Link | Parent, role: Callable[[], None]) -> int:
    """Run one role; an error goes to the other end of the channel with its class and message."""
    try:
        role()
    except EvenerError as error:
        if isinstance(error, PluginError):  # its author is told no more than a line by whoever waits
            log.exception("the process failed")
        end.send(_ENCODER.encode(Failed(type(error).__name__, str(error))))
        return 1
    except Exception as error:  # a defect, or another rank that has gone: whoever waits is told, and the log has it all
        log.exception("the process failed")
        end.send(_ENCODER.encode(Failed(EngineError.__name__, f"{type(error).__name__}: {error}")))
        return 1
    finally:
        end.close()
    return 0


def run_rank(config: Config, launched: Launched, level: int) -> NoReturn:
    """In a rank above zero that ``torchrun`` has started: be a worker, until the controller ends it."""
    sys.stdout.flush()  # of the program that it was until now
    set_up_logging(config.log, level)
    place = Place.of(launched, config.infer.tp_size, config.infer.pp_size)
    contact = launched.find()
    link = Link(contact.addresses, launched.rank, contact.keys, config.infer.silence_limit)
    code = attempt(link, lambda: run_worker(config, link, place))
    # Libraries whose other ranks have gone may hang when they are torn down.
    logging.shutdown()
    os._exit(code)


def main(argv: list[str]) -> int:
    """Run the role that the parent asks for."""
    role, level = argv
    orders = read_orders()
    flat = orders["config"]
    config = from_overrides(flat.pop("model"), flat)
    set_up_logging(config.log, int(level))
    if role == "controller":
        parent = Parent(orders["address"], config.infer.silence_limit)
        return attempt(parent, lambda: run_controller_process(config, parent))
    place = msgspec.convert(orders["place"], Place)
    contact = msgspec.convert(orders["contact"], Contact)
    link = Link(contact.addresses, place.world.rank, contact.keys)

    def work() -> None:
        if contact.keys is not None and (launched := Launched.of(os.environ)) is not None:
            launched.publish(contact)
        run_worker(config, link, place)

    return attempt(link, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
