"""Workers of several ranks as threads of one process: what ranks compute, without what starts and watches them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.config import from_overrides
from evener.config.schema import Config
from evener.config.source import with_local_model
from evener.distributed.world import Ranks, World
from evener.engine.clients import InlineClient
from evener.engine.controller import Controller
from evener.engine.executor import Executor
from evener.engine.messages import Ready
from evener.engine.plan import Plan, StepResult
from evener.engine.runner import PendingStep
from evener.engine.start import control
from evener.engine.worker import Worker
from evener.engine.worker_facts import agree
from evener.errors import EngineDeadError
from evener.frontend.settings import FrontendSettings
from evener.llm import LLM
from evener.search import Search
from evener.testing.communicators import ThreadCommunicator, thread_group


class RankThreads(Executor):
    """Each rank's worker lives in a thread of its own and takes plans from a queue.

    Every rank that has the head samples, and what they sampled must be equal.

    Args:
        patience: seconds that a rank waits for another, and a reader for a result; None: as long as it takes.

    Attributes:
        workers: by rank.

    Raises:
        BaseException: what stopped a rank from starting.
    """

    def __init__(self, config: Config, patience: float | None = 60.0) -> None:
        self._patience = patience
        worlds = [World.of(rank, config.infer.tp_size, config.infer.pp_size) for rank in range(_size(config))]
        self._plans: list[queue.SimpleQueue[Plan | None]] = [queue.SimpleQueue() for _ in worlds]
        self._results: dict[int, queue.SimpleQueue[StepResult | BaseException]] = {
            world.rank: queue.SimpleQueue() for world in worlds if world.last_stage
        }
        started: queue.SimpleQueue[tuple[int, Worker | BaseException]] = queue.SimpleQueue()
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
            # Told first: the others fail for want of this rank once they are let go.
            started.put((ranks.world.rank, error))
            self._let_go()
            return
        started.put((ranks.world.rank, worker))
        try:
            self._serve(worker, ranks.world)
        except BaseException as error:
            for results in self._results.values():
                results.put(error)
            self._let_go()

    def _serve(self, worker: Worker, world: World) -> None:
        pending: deque[PendingStep] = deque()
        while (plan := self._plans[world.rank].get()) is not None:
            pending.append(worker.execute(plan))
            result = pending.popleft().wait()
            if world.last_stage:
                self._results[world.rank].put(result)

    def _let_go(self) -> None:
        for group in self._groups:
            group.abort()

    def submit(self, plan: Plan) -> None:
        for plans in self._plans:
            plans.put(plan)

    def read(self) -> StepResult:
        found: list[StepResult] = []
        for results in self._results.values():
            result = results.get(timeout=self._patience)
            if isinstance(result, BaseException):
                raise EngineDeadError(f"a rank failed: {result}") from result
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
    executor = RankThreads(config)
    try:
        yield control(config, executor, agree([worker.facts for worker in executor.workers])), executor
    finally:
        executor.close()


def threaded_llm(model: str | Path, **overrides: object) -> LLM:
    """An ``LLM`` whose ranks (``infer.tp_size``, ``infer.pp_size``) are threads of this process, for a debugger: a
    breakpoint in a layer or a kernel stops the run there, and nobody is taken for dead meanwhile. All ranks share
    device 0 and its memory, so ``infer.kv_memory`` is what each of them takes.

    Raises:
        EvenerError: as ``LLM``.
    """
    config = with_local_model(from_overrides(str(model), overrides))
    executor = RankThreads(config, patience=None)
    facts = agree([worker.facts for worker in executor.workers])
    client = InlineClient(control(config, executor, facts), Ready(info=facts.info))
    return LLM.from_client(client, settings=FrontendSettings.from_config(config))


def _size(config: Config) -> int:
    return config.infer.tp_size * config.infer.pp_size
