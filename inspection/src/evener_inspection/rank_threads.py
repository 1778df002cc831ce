"""The executor whose workers are threads of this process, one for each rank; for debuggers and tests.

Ranks compute the same as in processes of their own, but nothing starts or watches processes. ``executor=inline`` with
more than one rank uses it.
"""

from __future__ import annotations

import logging
import queue
import threading

from msgspec import structs

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.config.stages import config_of_stage, device_of_rank
from evener.distributed.world import RankGroups, World
from evener.engine.facts.worker_facts import merge_facts
from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Order, StepResult
from evener.engine.worker.worker import Worker
from evener_inspection.thread_communicator import ThreadCommunicator, thread_group

log = logging.getLogger("evener.ranks")


class RankThreads(Executor):
    """Runs each rank's worker in a thread, which takes orders from a queue.

    Rank i uses device i, or the one that ``infer.stages`` says. With fewer devices, ranks share them in turn, and
    ``infer.kv_memory`` is the amount for each rank. All ranks of the last stage sample, and their results must be
    equal.

    Args:
        search: for the backend of the first stage; knows how many devices there are.
        timeout: seconds that a rank waits for another rank, and ``read`` for a result; None waits without limit, for
            use with a debugger that stops threads.

    Attributes:
        workers: the workers by rank.
        facts: what the workers agree on.

    Raises:
        BaseException: the error that stopped a rank from starting.
    """

    def __init__(self, config: Config, search: BackendSearch, timeout: float | None = None) -> None:
        self._timeout = timeout
        sizes = config.infer.tp_size, config.infer.pp_size
        worlds = [World.of(rank, *sizes) for rank in range(sizes[0] * sizes[1])]
        # This imports the packages before the threads start, which would otherwise import them at the same time.
        devices = []
        for stage in range(sizes[1]):
            own = config_of_stage(config, stage)
            loaded = (BackendSearch(own.backend) if stage else search).load(own.options)
            devices.append(len(loaded.selection.probe.devices) or 1)
        self._orders: list[queue.SimpleQueue[Order | None]] = [queue.SimpleQueue() for _ in worlds]
        self._results: dict[int, queue.SimpleQueue[StepResult | BaseException]] = {
            world.rank: queue.SimpleQueue() for world in worlds if world.last_stage
        }
        self._answers: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[tuple[int, Worker | BaseException]] = queue.SimpleQueue()
        self._failure_lock = threading.Lock()
        self._failed = False
        self._groups: list[ThreadCommunicator] = []
        ends: list[dict[str, ThreadCommunicator]] = [{} for _ in worlds]
        columns = {world.pp_ranks for world in worlds}
        for name, members in (("tp", {world.tp_ranks for world in worlds}), ("pp", columns), ("ids", columns)):
            for ranks in (each for each in members if len(each) > 1):
                for rank, end in zip(ranks, thread_group(name, len(ranks), timeout), strict=True):
                    ends[rank][name] = end
                    self._groups.append(end)
        self._threads = [
            threading.Thread(
                target=self._run, name=f"evener-rank-{world.rank}", daemon=True,
                args=(config, RankGroups(world, device=device % devices[world.pp_rank], local_size=alike, **end)),
            )
            for world, end in zip(worlds, ends, strict=True)
            for device, alike in [device_of_rank(config, world.rank, world.rank, len(worlds))]
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()
        found = dict(self._started.get() for _ in worlds)
        # In order of arrival: ranks that failed because of another one came later.
        self.workers = [worker for _, worker in sorted(found.items()) if isinstance(worker, Worker)]
        if errors := [each for each in found.values() if isinstance(each, BaseException)]:
            self.close()
            raise errors[0]
        self.facts = merge_facts([worker.facts for worker in self.workers])

    def _run(self, config: Config, ranks: RankGroups) -> None:
        rank = ranks.world.rank
        try:
            own = config_of_stage(config, ranks.world.pp_rank)
            worker = Worker(own, BackendSearch(own.backend), ranks=ranks)
        except BaseException as error:
            # Reported before the groups are aborted, because the others fail when that happens.
            self._started.put((rank, error))
            self._abort_groups()
            return
        self._started.put((rank, worker))
        try:
            self._serve(worker, ranks.world)
        except BaseException as error:
            self._fail(ranks.world, error)

    def _serve(self, worker: Worker, world: World) -> None:
        while (order := self._orders[world.rank].get()) is not None:
            step = worker.execute(order)
            if step is not None and step.every_rank:
                self._answers.put(step.wait())
            elif step is not None and world.last_stage:
                self._results[world.rank].put(step.wait())

    def _fail(self, world: World, error: BaseException) -> None:
        """Report the first failure only: the other ranks fail because of it."""
        with self._failure_lock:
            first, self._failed = not self._failed, True
        if first:
            log.error("the %s failed; the other ranks end with it", world.name, exc_info=error)
            for results in self._results.values():
                results.put(error)
            self._answers.put(error)
            self._abort_groups()

    def _abort_groups(self) -> None:
        for group in self._groups:
            group.abort()

    def submit(self, order: Order) -> None:
        for orders in self._orders:
            orders.put(order)

    def read(self) -> StepResult:
        """As ``Executor.read``.

        Raises:
            BaseException: the error of a rank, with its traceback.
        """
        found: list[StepResult] = []
        for results in self._results.values():
            result = results.get(timeout=self._timeout)
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        own = {"transfers": found[0].transfers, "counters": found[0].counters}  # ranks copy and compute at their speed
        alike = [structs.replace(result, **own) for result in found]
        assert all(result == found[0] for result in alike), f"ranks sampled different tokens: {found}"
        return found[0]

    def command(self, order: Order) -> list[StepResult]:
        self.submit(order)
        found: list[StepResult] = []
        for _ in self._orders:
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join()
        for worker in self.workers:
            worker.close()
