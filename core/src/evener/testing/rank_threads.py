"""Workers of several ranks as threads of one process: what ranks compute, without what starts and watches them."""

from __future__ import annotations

import queue
import threading
from collections import deque

from evener.config.schema import Config
from evener.engine.controller import Controller
from evener.engine.executor import Executor
from evener.engine.plan import Plan, StepResult
from evener.engine.runner import PendingStep
from evener.engine.search import Search
from evener.engine.start import control
from evener.engine.worker import Worker
from evener.engine.worker_facts import agree
from evener.engine.world import Ranks, World
from evener.errors import EngineDeadError
from evener.testing.communicators import ThreadCommunicator, thread_group


class RankThreads(Executor):
    """Each rank's worker lives in a thread of its own and takes plans from a queue.

    Attributes:
        workers: by rank.

    Raises:
        BaseException: what stopped a rank from starting.
    """

    def __init__(self, config: Config) -> None:
        worlds = [World.of(rank, config.infer.tp_size, config.infer.pp_size) for rank in range(_size(config))]
        self._plans: list[queue.SimpleQueue[Plan | None]] = [queue.SimpleQueue() for _ in worlds]
        self._out: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        started: queue.SimpleQueue[tuple[int, Worker | BaseException]] = queue.SimpleQueue()
        self._groups: list[ThreadCommunicator] = []
        ends: list[dict[str, ThreadCommunicator]] = [{} for _ in worlds]
        for name, members in (("tp", worlds[0].tp_groups), ("pp", worlds[0].pp_groups), ("ids", worlds[0].pp_groups)):
            for ranks in members if len(members[0]) > 1 else ():
                for rank, end in zip(ranks, thread_group(name, len(ranks)), strict=True):
                    ends[rank][name] = end
                    self._groups.append(end)
        self._threads = [
            threading.Thread(
                target=self._run, daemon=True,
                args=(config, Ranks(world, end.get("tp"), end.get("pp"), end.get("ids")), started),
            )
            for world, end in zip(worlds, ends, strict=True)
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()
        found: dict[int, Worker] = {}
        for _ in worlds:
            rank, worker = started.get()
            if isinstance(worker, BaseException):
                raise worker
            found[rank] = worker
        self.workers = [worker for _, worker in sorted(found.items())]

    def _run(
        self, config: Config, ranks: Ranks, started: queue.SimpleQueue[tuple[int, Worker | BaseException]]
    ) -> None:  # fmt: skip
        try:
            worker = Worker(config, Search(config.backend), ranks=ranks)
        except BaseException as error:
            self._let_go()
            started.put((ranks.world.rank, error))
            return
        started.put((ranks.world.rank, worker))
        try:
            self._serve(worker, ranks.world)
        except BaseException as error:
            self._let_go()
            self._out.put(error)

    def _serve(self, worker: Worker, world: World) -> None:
        pending: deque[PendingStep] = deque()
        while (plan := self._plans[world.rank].get()) is not None:
            pending.append(worker.execute(plan))
            result = pending.popleft().wait()
            if world.reports:
                self._out.put(result)

    def _let_go(self) -> None:
        for group in self._groups:
            group.abort()

    def submit(self, plan: Plan) -> None:
        for plans in self._plans:
            plans.put(plan)

    def read(self) -> StepResult:
        result = self._out.get(timeout=60)
        if isinstance(result, BaseException):
            raise EngineDeadError(f"a rank failed: {result}") from result
        return result

    def close(self) -> None:
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join()


def rank_threads(config: Config) -> tuple[Controller, RankThreads]:
    """A controller over ranks as threads.

    Raises:
        EvenerError: as ``build_controller``.
    """
    executor = RankThreads(config)
    return control(config, executor, agree([worker.facts for worker in executor.workers])), executor


def _size(config: Config) -> int:
    return config.infer.tp_size * config.infer.pp_size
