"""The executor whose workers run in child processes, one for each rank."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from evener.config.schema import Config, to_flat
from evener.distributed.contact import Contact
from evener.distributed.world import RankPlacement, World
from evener.engine.facts.worker_facts import WorkerFacts, merge_facts
from evener.engine.processes.child_process import ADVICE, ChildFailure, ChildProcess, describe_silence, read_failure
from evener.engine.processes.control_channel import SHUTDOWN, ControlServer
from evener.engine.wire.child_spec import ChildSpec
from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Order, StepResult
from evener.errors import EngineDeadError

#: Seconds between two checks whether the workers are alive, and for the search for the first cause of a failure. While
#: a worker starts, the heartbeat timeout is so many times longer: loading a library may hold Python's lock for long.
_POLL_INTERVAL, _FAILURE_GRACE, _STARTUP_FACTOR = 0.2, 0.5, 6
_ENCODER = msgspec.msgpack.Encoder()
_RESULTS = msgspec.msgpack.Decoder(StepResult | ChildFailure)


class ProcessExecutor(Executor):
    """Runs one worker process for each rank. The constructor waits until all are ready.

    Args:
        launched: this process as rank 0 of those that a launcher has started (``launch.launched_rank``): it starts its
            own worker, the others are workers themselves. None starts all workers on this machine.

    Attributes:
        facts: what the workers agree on.
        children: the workers that this process has started, by rank.

    Raises:
        EvenerError: the error that stopped a worker from starting.
    """

    def __init__(self, config: Config, launched: Any | None = None) -> None:
        infer = config.infer
        sizes = infer.tp_size, infer.pp_size
        self._heartbeat_timeout, self._failed = _STARTUP_FACTOR * infer.heartbeat_timeout, False
        self._step_timeout = infer.step_timeout
        self._worlds = [World.of(rank, *sizes) for rank in range(sizes[0] * sizes[1])]
        self._control = ControlServer(None if launched is None else launched.interface)
        self.children: dict[int, ChildProcess] = {}
        meet = f"file://{self._control.folder.path}/meet"
        try:
            here = [RankPlacement(world, world.rank, world.size, meet) for world in self._worlds]
            for place in here if launched is None else [launched.place(*sizes)]:
                self._start(config, place)
            self.facts = merge_facts(self._gather())
            self._heartbeat_timeout = infer.heartbeat_timeout
        except BaseException:
            self.close(0)
            raise

    def _start(self, config: Config, place: RankPlacement) -> None:
        world, contact = place.world, Contact(self._control.addresses, self._control.keys)
        spec = ChildSpec(config=to_flat(config), contact=contact, place=place)
        self._control.heartbeats.register(str(world.rank))
        # The ranks of one machine need no other interface than the loopback.
        local = {"GLOO_SOCKET_IFNAME": "lo"} if world.size > 1 and contact.keys is None else {}
        self.children[world.rank] = ChildProcess("worker", world.name, spec, local)

    def _gather(self) -> list[WorkerFacts]:
        found: dict[int, WorkerFacts] = {}
        while len(found) < len(self._worlds):
            if (received := self._control.receive(_POLL_INTERVAL)) is None:
                self.check()
                continue
            rank, data = received
            if (failed := read_failure(data)) is not None:
                self._raise_if_worker_dead(_FAILURE_GRACE)
                raise failed.error(f"{self._worlds[rank].name}: " if len(self._worlds) > 1 else "")
            found[rank] = msgspec.msgpack.decode(data, type=WorkerFacts)
        return [facts for _, facts in sorted(found.items())]

    def submit(self, order: Order) -> None:
        data = _ENCODER.encode(order)
        for world in self._worlds:
            try:
                self._control.send(world.rank, data)
            except EngineDeadError as error:
                self._raise_if_worker_dead(_FAILURE_GRACE)
                raise self._worker_dead(f"the {world.name} process cannot be reached: {error}") from None

    def command(self, order: Order) -> list[StepResult]:
        self.submit(order)
        return [self.read(0) for _ in self._worlds]  # without a limit: dead workers are noticed

    def read(self, timeout: float | None = None) -> StepResult:
        timeout = self._step_timeout if timeout is None else timeout
        began = time.monotonic()
        while True:
            if (received := self._control.receive(_POLL_INTERVAL)) is not None:
                rank, data = received
                result: StepResult | ChildFailure = _RESULTS.decode(data)
                if not isinstance(result, ChildFailure):
                    return result
                # A rank also fails when another one was killed: then that one is reported.
                self._raise_if_worker_dead(_FAILURE_GRACE)
                raise self._worker_dead(f"the {self._worlds[rank].name} process failed: {result.message}")
            self.check()
            if timeout and time.monotonic() - began > timeout:
                limit = f"infer.step_timeout={timeout:g} s"
                raise self._worker_dead(f"a step has taken more than {limit} (a kernel or a collective may hang)")

    def check(self) -> None:
        self._raise_if_worker_dead(0)

    def _raise_if_worker_dead(self, grace: float) -> None:
        """Raise ``EngineDeadError`` if a worker has ended or sends no heartbeats.

        When one worker is killed, the others fail because of it. So a killed one is reported first, and after an error
        the search for it takes up to ``grace`` seconds. Without ``grace``, an ended worker is not reported while a
        message can still be read: that says more than an exit code.
        """
        until = time.monotonic() + grace
        while True:
            ended = [child for child in self.children.values() if child.exit_description() is not None]
            killed = [child for child in ended if child.process.returncode < 0]
            if killed or time.monotonic() >= until:
                break
            time.sleep(0.02)
        if killed or (ended and not grace and not self._control.has_message(_FAILURE_GRACE)):
            raise self._worker_dead(str((killed or ended)[0].exit_description()))
        for world in self._worlds:
            silent = self._control.heartbeats.seconds_since_last(str(world.rank))
            if self._heartbeat_timeout and silent > self._heartbeat_timeout:
                raise self._worker_dead(describe_silence(world.name, silent))

    def _worker_dead(self, what: str) -> EngineDeadError:
        """Kill the other workers, so that their devices become free. Returns the error to raise."""
        self._failed = True
        for child in self.children.values():
            child.process.kill()
        return EngineDeadError(f"{what}; {ADVICE}")

    def close(self, timeout: float = 10.0) -> None:
        for world in self._worlds if len(self.children) < len(self._worlds) else ():
            with contextlib.suppress(EngineDeadError):  # it has ended already
                self._control.send(world.rank, SHUTDOWN)
        for child in self.children.values():
            child.close_stdin()
        until = time.monotonic() + (0 if self._failed else timeout)
        for child in self.children.values():
            child.end(max(0.0, until - time.monotonic()))
        self._control.close()
