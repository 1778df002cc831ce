"""The connector ``host+transfer``: blocks of other servers beside those that host memory keeps.

A request whose blocks come from another server waits for these first, then for the part of its prefix that host memory
has, which is not fetched. Both halves name a transfer by a number: even for host memory, odd for other servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evener.config.schema import Config
from evener.contracts.connector import BlockMove, BlockMover, BlockMoves, BlockTransfer, Connector, StartingRequest
from evener.engine.controller.state import StateManager
from evener.engine.facts.worker_facts import WorkerFacts
from evener_kv.counted import Counted
from evener_kv.host import HostConnector
from evener_kv.host_blocks import HostBlocks
from evener_kv.transfer.connector import TransferConnector
from evener_kv.transfer.held_blocks import Key
from evener_kv.transfer.remote_blocks import RemoteBlocks

if TYPE_CHECKING:
    import torch

    from evener.engine.worker.assembly import Assembly


class SharedConnector:
    """Makes the halves."""

    @staticmethod
    def controller(config: Config, facts: WorkerFacts, state: StateManager) -> Connector:
        """The half that decides.

        Raises:
            ConfigError: as those of the two connectors.
        """
        return SharedBlocks(
            HostConnector.controller(config, facts, state), TransferConnector.controller(config, facts, state)
        )

    @staticmethod
    def worker(assembly: Assembly, storage: torch.Tensor) -> BlockMover:
        """A rank's half; ``storage`` is what ``Geometry.bind`` returned.

        Raises:
            ConfigError: as those of the two connectors.
        """
        host = HostConnector.worker(assembly, storage)
        try:
            return SharedMover(host, TransferConnector.worker(assembly, storage))
        except BaseException:
            host.close()
            raise


class SharedBlocks(Connector):
    """The controller's half: ``host`` and ``remote`` together."""

    def __init__(self, host: HostBlocks, remote: RemoteBlocks) -> None:
        self.host, self.remote = host, remote
        host.unwritten, remote.kept = remote.unwritten, self._kept
        self.counters = Counted(host.counters, remote.counters)

    def _kept(self, key: Key) -> int | None:
        """What comes back from host memory, or from files through it."""
        place, files = self.host.places.find(key), self.host.files
        return place or (1 if files is not None and key in files else None)

    def ready(self, request: StartingRequest, busy: bool) -> bool:
        # Fetched blocks wait in memory of their own, so blocks of the pool are taken only when all have arrived.
        return self.remote.arrived(request, busy) and self.host.ready(request, busy) and self.remote.load(request, busy)

    def started(self, request: StartingRequest) -> None:
        self.remote.started(request)
        self.host.started(request)

    def dropped(self, request: StartingRequest) -> None:
        self.remote.dropped(request)
        self.host.dropped(request)

    def give_back(self) -> bool:
        return self.host.give_back() or self.remote.give_back()

    def moves(self) -> BlockMoves | None:
        host, remote = self.host.moves(), self.remote.moves()
        out: list[BlockMove] = [] if host is None else host.out
        back, waits = list[BlockTransfer](), list[int]()
        for which, found in enumerate((host, remote)):
            if found is not None:
                back += [BlockTransfer(2 * each.id + which, each.moves) for each in found.back]
                waits += [2 * each + which for each in found.waits]
        return BlockMoves(out=out, back=back, waits=waits) if out or back or waits else None

    def done(self, transfers: Sequence[int]) -> None:
        self.host.done([each // 2 for each in transfers if not each % 2])


class SharedMover(BlockMover):
    """A rank's half: ``host`` and ``remote`` together."""

    def __init__(self, host: BlockMover, remote: BlockMover) -> None:
        self.host, self.remote = host, remote
        self.slabs = host.slabs

    def begin(self, moves: BlockMoves) -> None:
        # Host memory first: it copies blocks that leave, to which the other may write.
        for which, mover in enumerate((self.host, self.remote)):
            out = [] if which else moves.out
            back = [BlockTransfer(each.id // 2, each.moves) for each in moves.back if each.id % 2 == which]
            waits = [each // 2 for each in moves.waits if each % 2 == which]
            if out or back or waits:  # the first half counts plans in which it has something to say
                mover.begin(BlockMoves(out=out, back=back, waits=waits))

    def finished(self) -> list[int]:
        return [2 * each for each in self.host.finished()] + [2 * each + 1 for each in self.remote.finished()]

    def counters(self) -> Mapping[str, int]:
        return {**self.host.counters(), **self.remote.counters()}

    def close(self) -> None:
        try:
            self.host.close()
        finally:  # ends threads and connections even if the first half failed
            self.remote.close()
