"""The controller: takes messages, keeps the executor busy and reports events. Only the controller ends requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec.structs import asdict

from evener.engine.controller.deadlines import Deadlines
from evener.engine.controller.scheduler import Scheduler
from evener.engine.wire import messages
from evener.engine.wire.executor import Executor
from evener.engine.wire.installed import find_commands
from evener.engine.wire.messages import Dead, FromController, NewRequest, StatsReport, ToController
from evener.engine.wire.plan import Order
from evener.errors import CheckpointError, EngineError

#: Seconds between two checks of the workers while there is nothing to compute.
_CHECK_INTERVAL = 0.25


class Mailbox(Protocol):
    """The controller's end of its channel to the front end."""

    def take(self, timeout: float) -> list[ToController]:
        """The messages since the last call, in order. Waits up to ``timeout`` seconds for the first; 0: not at all."""

    def put(self, events: Sequence[FromController]) -> None:
        """Hand events to the front end, in order."""


class Controller:
    """A scheduler and an executor, driven by ``run``, or by calls to ``handle`` and ``step``; it has no thread of its
    own.

    Args:
        depth: how many plans may be in flight; with 1, each result is read before the next plan is made.
        max_queue: requests that may wait for state; more are refused with status 429.

    Attributes:
        stopping: whether ``Shutdown`` was received.
        dead: why the engine has failed; None while it works.
        commands: what packages with commands keep between two commands, by the command's name.
        paused: why new requests are refused, set by a command; None: they are accepted.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int, max_queue: float = math.inf) -> None:
        self.scheduler, self.executor, self.depth, self.max_queue = scheduler, executor, depth, max_queue
        self.commands: dict[str, Any] = {}
        self.paused: str | None = None
        self.deadlines = Deadlines(time.monotonic)
        self.stopping = False
        self.dead: str | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is open and no plan is in flight."""
        return self.scheduler.open == 0 and self.scheduler.in_flight == 0

    def run(self, mailbox: Mailbox) -> None:
        """Work until ``Shutdown`` was received and all requests have ended. Until then a dead engine still answers each
        request, with the error that killed it. Works the same in a thread and in a process."""
        self.executor.attach()
        while not (self.stopping and (self.idle or self.dead)):
            idle = self.idle or self.dead is not None
            events = self.handle(mailbox.take(_CHECK_INTERVAL if idle else 0))
            events += self.step() if not self.idle else self.check()
            if events:
                mailbox.put(events)

    def close(self) -> None:
        """Close the listeners of the prefix cache, then the workers. Calling it again does nothing."""
        while listeners := self.scheduler.state.pool.listeners:
            listeners.pop().close()
        self.executor.close()

    def handle(self, received: Iterable[ToController]) -> list[FromController]:
        """Process messages in order. Returns the events for the front end."""
        return [event for message in received for event in self._handle(message)]

    def _handle(self, message: ToController) -> list[FromController]:
        match message:
            case NewRequest() if self.scheduler.blocked and len(self.scheduler.waiting) >= self.max_queue:
                error = f"{len(self.scheduler.waiting)} requests wait for memory: try again in a moment"
                return [messages.Finished(id=message.id, reason="error", error=error, status=429)]
            case NewRequest() if self.paused and not self.dead:
                return [messages.Finished(id=message.id, reason="error", error=self.paused, status=503)]
            case NewRequest():
                self.deadlines.set(message.id, message.max_time)
                events = self.scheduler.add(message)
                if self.dead or self.stopping:
                    events += self.scheduler.end(message.id, "error", self.dead or "the engine is shutting down")
                return events
            case messages.Abort():
                return self.scheduler.end(message.id, "abort")
            case messages.Finish():
                return self.scheduler.end(message.id, "stop")
            case messages.LoadAdapter() | messages.UnloadAdapter():
                return self._submit_orders(self.scheduler.adapters.handle(message))
            case messages.Command():
                try:
                    commands = find_commands(message.name)
                except CheckpointError as error:
                    return [messages.CommandDone(str(error))]
                return commands.run(self, message)  # type: ignore[no-any-return]
            case messages.GetStats():
                return [self._stats()]
            case messages.Shutdown():
                self.stopping = True
                return [] if message.drain else self.scheduler.end_all("abort")

    def _submit_orders(self, orders: Iterable[Order]) -> list[FromController]:
        return self._attempt(lambda: [self.executor.submit(order) for order in orders])

    def _attempt(self, work: Callable[[], object]) -> list[FromController]:
        """Do ``work`` with the workers, unless the engine is dead. Returns the events of ``die`` if one has died."""
        try:
            if not self.dead:
                work()
        except EngineError as error:
            return self.die(str(error))
        return []

    def _stats(self) -> StatsReport:
        scheduler, pool = self.scheduler, self.scheduler.state.pool
        stats = scheduler.stats
        # ``asdict`` copies no containers, and a front end in this process would see them change.
        copies = {"preempted": list(stats.preempted), "queued": list(stats.queued), "counters": dict(stats.counters)}
        return StatsReport(
            waiting=len(scheduler.waiting), running=len(scheduler.running), blocks=pool.count - pool.slab,
            blocks_used=pool.used, **asdict(stats) | copies,
        )  # fmt: skip

    def step(self) -> list[FromController]:
        """Submit plans until ``depth`` are in flight, then read the oldest result. Returns the events to report.

        Does nothing when there is nothing to compute. If a worker has died, every request ends with that error, and the
        last event is ``Dead``.
        """
        if self.dead:
            return []
        events = [event for name in self.deadlines.expired() for event in self.scheduler.end(name, "timeout")]
        scheduler, grammars = self.scheduler, self.scheduler.grammars
        try:
            while scheduler.in_flight < self.depth and (plan := scheduler.schedule()) is not None:
                self.executor.submit(grammars.prepare(plan))
                grammars.submitted(self.executor)
            for name, why in grammars.failures(scheduler.running):
                events += scheduler.end(name, "error", why, status=400)
            events += scheduler.retire(grammars.read(self.executor)) if scheduler.in_flight else []
            return events + self._submit_orders(scheduler.adapters.forgotten())
        except EngineError as error:
            return events + self.die(str(error))

    def check(self) -> list[FromController]:
        """While no step runs: check that the workers are alive. Returns the same events as ``step`` if one is not."""
        return self._attempt(self.executor.check)

    def die(self, reason: str) -> list[FromController]:
        """End every open request with this reason, because the engine cannot continue."""
        self.dead = reason
        return [*self.scheduler.end_all("error", reason), Dead(reason)]
