"""An engine whose workers are ranks on threads: what processes do, in one, for tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from evener.config.schema import Config
from evener.engine.controller import Controller
from evener.engine.executor import Executor
from evener.engine.plan import Plan, StepResult
from evener.engine.search import Search
from evener.engine.start import control
from evener.engine.worker import PendingStep, Worker
from evener.engine.worker_facts import agree
from evener.engine.world import Ranks, World
from evener.testing.communicators import thread_group


class ThreadRanks(Executor):
    """One worker a rank, each on a thread of its own. Every plan goes to all of them; their results must be equal.

    Args:
        ranks: how many share each layer.
    """

    def __init__(self, config: Config, ranks: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(ranks)]
        self._ends = thread_group("tp", ranks)
        self._pending: deque[list[Future[PendingStep]]] = deque()
        self.workers: list[Worker] = self._each(
            lambda rank: Worker(config, Search(config.backend), ranks=Ranks(World.of(rank, ranks), self._ends[rank]))
        )

    def _start(self, work: Callable[[int], Any]) -> list[Future[Any]]:
        def one(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                self._ends[rank].abort()
                raise

        return [thread.submit(one, rank) for rank, thread in enumerate(self._threads)]

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        return [future.result() for future in self._start(work)]

    def submit(self, plan: Plan) -> None:
        self._pending.append(self._start(lambda rank: self.workers[rank].execute(plan)))

    def read(self) -> StepResult:
        steps = [future.result() for future in self._pending.popleft()]
        results: list[StepResult] = self._each(lambda rank: steps[rank].wait())
        assert all(result == results[0] for result in results), f"ranks sampled different tokens: {results}"
        return results[0]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def rank_controller(config: Config, ranks: int) -> Controller:
    """A controller over ``ranks`` workers on threads."""
    executor = ThreadRanks(config, ranks)
    return control(config, executor, agree([worker.facts for worker in executor.workers]))
