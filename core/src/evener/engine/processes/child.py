"""The program of a child process: ``python -m <this module> worker|controller LOG_LEVEL``, see ``child_process``."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from evener.backend_search import BackendSearch
from evener.config import from_overrides
from evener.config.schema import Config
from evener.config.stages import config_of_stage, device_of_rank
from evener.distributed.world import RankPlacement
from evener.engine.processes.child_process import ChildFailure, ParentChannel, read_spec
from evener.engine.processes.control_channel import SHUTDOWN, ControlClient
from evener.engine.processes.launch import launched_rank
from evener.engine.wire.plan import Order
from evener.errors import EngineError, EvenerError, NoBackendError, PluginError
from evener.logs import set_up_logging

if TYPE_CHECKING:
    from evener.engine.sampling.pending import PendingStep

log = logging.getLogger("evener.engine")
_ENCODER = msgspec.msgpack.Encoder()


def run_worker(config: Config, control: ControlClient, place: RankPlacement) -> None:
    """Run plans as they arrive, until the channel says to stop. One rank (``World.reports``) sends the results, each as
    soon as it is there."""
    device, alike = device_of_rank(config, place.world.rank, place.device, place.local_size)
    place, config = replace(place, device=device, local_size=alike), config_of_stage(config, place.world.pp_rank)
    search = BackendSearch(config.backend)
    from evener.engine.worker.worker import Worker  # imports torch while the probes of ``search`` run

    worker = Worker(config, search, serving=True, ranks=place)
    control.send(_ENCODER.encode(worker.facts))
    # Later collections do not look at the objects of the start, which would take a tenth of a second between two steps.
    gc.collect()
    gc.freeze()
    decoder = msgspec.msgpack.Decoder(Order)
    pending: deque[PendingStep] = deque()
    while True:
        # Send finished results before the next plan starts: on a device that computes inside ``execute``, the
        # controller then works at the same time.
        while pending and pending[0].ready():
            control.send(_ENCODER.encode(pending.popleft().wait()))
        # Take a plan that is already here even while a result is pending, so that the device stays busy.
        if (data := control.receive(0 if pending else None)) == SHUTDOWN:
            return
        if data is not None:
            step = worker.execute(decoder.decode(data))
            if step is not None and (place.world.reports or step.every_rank):
                pending.append(step)
        elif pending:
            control.send(_ENCODER.encode(pending.popleft().wait()))


def run_controller_process(config: Config, parent: ParentChannel) -> None:
    """Serve one front end until it sends ``Shutdown``."""
    from evener.engine.processes.start import build_controller

    controller, ready = build_controller(config, serving=True)
    parent.put([ready])
    gc.freeze()  # as in ``run_worker``
    controller.run(parent)
    controller.close()


def run_role(end: ControlClient | ParentChannel, role: Callable[[], None]) -> int:
    """Run one role and return the exit code. An error is sent to the other end of the channel as ``ChildFailure``."""
    try:
        role()
        return 0
    except Exception as error:
        # An error of a class that is not ours is a bug, or another rank has died. The other end shows one line; the
        # author of the code that failed needs the traceback. When no backend fits, no code has failed.
        known = error if isinstance(error, EvenerError) else EngineError(f"{type(error).__name__}: {error}")
        if known is not error or (isinstance(error, PluginError) and not isinstance(error, NoBackendError)):
            log.exception("this process failed")
        end.send(_ENCODER.encode(ChildFailure(type(known).__name__, str(known))))
        return 1
    finally:
        end.close()


def main(argv: list[str]) -> int:
    """Run the role that ``argv`` names, and return the exit code."""
    role, level = argv
    spec = read_spec()
    config = from_overrides(spec.config.pop("model"), spec.config)
    set_up_logging(config.log, int(level))
    if role == "controller":
        parent = ParentChannel(spec.address, config.infer.heartbeat_timeout)
        return run_role(parent, lambda: run_controller_process(config, parent))
    control = ControlClient(spec.contact.addresses, spec.place.world.rank, spec.contact.keys)

    def work() -> None:
        if spec.contact.keys is not None and (launched := launched_rank(os.environ)) is not None:
            launched.publish(spec.contact)
        run_worker(config, control, spec.place)

    return run_role(control, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
