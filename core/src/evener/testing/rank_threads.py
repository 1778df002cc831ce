"""Workers of several ranks as threads of one process, for debuggers and tests: what ranks compute, without what starts
and watches them. ``executor=inline`` with more than one rank is this."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from evener.config.schema import Config
from evener.distributed.world import Ranks, World
from evener.engine.controller import Controller
from evener.engine.executor import Executor
from evener.engine.plan import Plan, StepResult
from evener.engine.runner import PendingStep
from evener.engine.start import control
from evener.engine.worker import Worker
from evener.engine.worker_facts import agree
from evener.search import Search
from evener.testing.communicators import ThreadCommunicator, thread_group

log = logging.getLogger("evener.ranks")


class RankThreads(Executor):
    """Each rank's worker lives in a thread of its own and takes plans from a queue.

    Rank i has device i; with fewer devices, ranks share them in turn, and ``infer.kv_memory`` is what each takes. Every
    rank that has the head samples, and what they sampled must be equal.

    Args:
        search: says how many devices there are.
        patience: seconds that a rank waits for another, and a reader for a result; None: as long as it takes, so that
            nobody is taken for dead while a debugger holds him.

    Attributes:
        workers: by rank.
        facts: what they agree on.

    Raises:
        BaseException: what stopped a rank from starting.
    """

    def __init__(self, config: Config, search: Search, patience: float | None = None) -> None:
        self._patience = patience
        worlds = [World.of(rank, config.infer.tp_size, config.infer.pp_size) for rank in range(_size(config))]
        # Packages are imported here, so that threads do not race for it.
        devices = len(search.load(config.options).selection.probe.devices) or 1
        self._plans: list[queue.SimpleQueue[Plan | None]] = [queue.SimpleQueue() for _ in worlds]
        self._results: dict[int, queue.SimpleQueue[StepResult | BaseException]] = {
            world.rank: queue.SimpleQueue() for world in worlds if world.last_stage
        }
        self._started: queue.SimpleQueue[tuple[int, Worker | BaseException]] = queue.SimpleQueue()
        self._failing = threading.Lock()
        self._failed = False
        self._groups: list[ThreadCommunicator] = []
        ends: list[dict[str, ThreadCommunicator]] = [{} for _ in worlds]
        columns = {world.pp_ranks for world in worlds}
        for name, members in (("tp", {world.tp_ranks for world in worlds}), ("pp", columns), ("ids", columns)):
            for ranks in (each for each in members if len(each) > 1):
                for rank, end in zip(ranks, thread_group(name, len(ranks), patience), strict=True):
                    ends[rank][name] = end
                    self._groups.append(end)
        self._threads = [
            threading.Thread(
                target=self._run, name=f"evener-rank-{world.rank}", daemon=True,
                args=(config, Ranks(world, device=world.rank % devices, local=len(worlds), **end)),
            )
            for world, end in zip(worlds, ends, strict=True)
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()
        found = dict(self._started.get() for _ in worlds)
        # In the order in which they came: who failed for want of another came later.
        errors = [each for each in found.values() if isinstance(each, BaseException)]
        if errors:
            self.close()
            raise errors[0]
        self.workers = [worker for _, worker in sorted(found.items()) if isinstance(worker, Worker)]
        self.facts = agree([worker.facts for worker in self.workers])

    def _run(self, config: Config, ranks: Ranks) -> None:
        rank = ranks.world.rank
        try:
            worker = Worker(config, Search(config.backend), ranks=ranks)
        except BaseException as error:
            # Told first: the others fail for want of this rank once they are let go.
            self._started.put((rank, error))
            self._let_go()
            return
        self._started.put((rank, worker))
        try:
            self._serve(worker, ranks.world)
        except BaseException as error:
            self._fail(ranks.world, error)

    def _serve(self, worker: Worker, world: World) -> None:
        pending: deque[PendingStep] = deque()
        while (plan := self._plans[world.rank].get()) is not None:
            pending.append(worker.execute(plan))
            result = pending.popleft().wait()
            if world.last_stage:
                self._results[world.rank].put(result)

    def _fail(self, world: World, error: BaseException) -> None:
        """Of several, the first failure is the one that is told: the others want for this rank."""
        with self._failing:
            first, self._failed = not self._failed, True
        if first:
            log.error("the %s failed", world.name, exc_info=error)
            for results in self._results.values():
                results.put(error)
            self._let_go()

    def _let_go(self) -> None:
        for group in self._groups:
            group.abort()

    def submit(self, plan: Plan) -> None:
        for plans in self._plans:
            plans.put(plan)

    def read(self) -> StepResult:
        """As ``Executor.read``.

        Raises:
            BaseException: what a rank raised, with its traceback.
        """
        found: list[StepResult] = []
        for results in self._results.values():
            result = results.get(timeout=self._patience)
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        assert all(result == found[0] for result in found), f"ranks sampled different tokens: {found}"
        return found[0]

    def close(self) -> None:
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join()


@contextmanager
def rank_threads(config: Config) -> Iterator[tuple[Controller, RankThreads]]:
    """A controller over ranks as threads, which end with the block.

    Raises:
        EvenerError: as ``build_controller``.
    """
    executor = RankThreads(config, Search(config.backend), patience=60.0)
    try:
        yield control(config, executor, executor.facts), executor
    finally:
        executor.close()


def _size(config: Config) -> int:
    return config.infer.tp_size * config.infer.pp_size
