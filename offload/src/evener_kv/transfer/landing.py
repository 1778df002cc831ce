"""The workers' half: sends blocks of this rank to others, and keeps those that were fetched until a plan copies them to
the device.

Blocks travel in the canonical layout, so the two ends may have different backends. Threads read blocks of the device
beside the steps: the controllers see to it that nobody writes to a block that is read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from evener.contracts.connector import BlockMove, BlockMover, BlockMoves
from evener.contracts.device import Device
from evener.engine.worker.assembly import Assembly
from evener.errors import EngineError
from evener_kv.block_bytes import ExportedBlocks
from evener_kv.transfer.connection import Channel, TransferError, TransferServer, connect
from evener_kv.transfer.messages import Data, Done, Drop, Fetch, Read, Refused, Request
from evener_kv.transfer.settings import Address, TransferSettings

log = logging.getLogger("evener.kv")
#: Bytes that are exported or imported at a time; more if one block is larger.
_PIECE = 16 << 20
#: Blocks that one request may name.
_MOST_BLOCKS = 1 << 18


class Landing(BlockMover):
    """Blocks of ``groups`` on their way.

    Args:
        spans: pages of a block of each group; ``pages``: of the whole pool.
        rank: this worker's.

    Raises:
        ConfigError: the rank's address cannot be listened on.
    """

    def __init__(
        self, device: Device, groups: Sequence[ExportedBlocks], spans: Sequence[int], pages: int,
        settings: TransferSettings, rank: int,
    ) -> None:  # fmt: skip
        self._device, self._groups, self._spans, self._pages = device, groups, spans, pages
        self._settings, self._rank, self._lock = settings, rank, threading.Lock()
        #: What was fetched, by place: uint8 [nbytes] in host memory.
        self._rows: dict[int, torch.Tensor] = {}
        #: Places of fetches that are under way; those that were dropped meanwhile are not kept.
        self._expected: set[int] = set()
        self._arriving = 0
        self._counters = {"kv_transfer_sent_bytes": 0, "kv_transfer_received_bytes": 0}
        self._server = TransferServer(settings.own.of_rank(rank), settings.key, self._answer)

    @classmethod
    def of(cls, assembly: Assembly, storage: torch.Tensor, settings: TransferSettings) -> Landing:
        """``storage`` is what ``Geometry.bind`` returned."""
        geometry, device = assembly.geometry, assembly.device
        groups = [
            ExportedBlocks(device, span, group, geometry.block_size)
            for group, span in zip(geometry.groups, geometry.spans, strict=True)
        ]
        pages = storage.shape[1] * geometry.spans[0] * geometry.groups[0].cut
        assembly.resolver.manifest.notes.append("blocks of the KV cache are shared with other servers over TCP")
        return cls(device, groups, geometry.spans, pages, settings, assembly.ranks.world.rank)

    def counters(self) -> Mapping[str, int]:
        return self._counters

    def close(self) -> None:
        self._server.close()

    def begin(self, moves: BlockMoves) -> None:
        with torch.inference_mode():
            for transfer in moves.back:
                for group, part in self._pieces(sorted(transfer.moves, key=lambda move: move.group)):
                    with self._lock:
                        rows = [self._rows.pop(move.place, None) for move in part]
                        self._arriving -= sum(row.nbytes for row in rows if row is not None)
                    found = [row for row in rows if row is not None]
                    if len(found) < len(rows):
                        raise EngineError("a plan names KV blocks that this rank has not fetched")
                    group.write([move.block for move in part], torch.stack(found).to(self._device.torch_device))

    def finished(self) -> list[int]:
        return []  # each plan waits for its own

    def _pieces(self, moves: Sequence[BlockMove]) -> Iterator[tuple[ExportedBlocks, list[BlockMove]]]:
        """The moves of one group after another, as many at a time as a piece has room for."""
        for index, found in groupby(moves, key=lambda move: move.group):
            group, several = self._groups[index], list(found)
            each = max(1, _PIECE // group.nbytes) if group.nbytes else 0
            for at in range(0, len(several) if each else 0, each or 1):
                yield group, several[at : at + each]

    # In threads of the server.

    def _answer(self, channel: Channel, request: Request) -> None:
        match request:
            case Read():
                self._send(channel, request)
            case Fetch():
                try:
                    self._fetch(request)
                except TransferError as error:
                    channel.send(Refused(str(error)))
                else:
                    channel.send(Done())
            case Drop():
                self._drop(request.places)
                channel.send(Done())
            case _:
                channel.send(Refused("that is for a controller"))

    def _moves(self, groups: Sequence[int], blocks: Sequence[int], places: Sequence[int]) -> list[BlockMove]:
        """Parallel lists as moves.

        Raises:
            TransferError: a number is none of a group or block.
        """
        if not len(groups) == len(blocks) == len(places) <= _MOST_BLOCKS:
            raise TransferError(f"the lists have {len(groups)}, {len(blocks)} and {len(places)} entries")
        moves = [BlockMove(*each) for each in zip(groups, blocks, places, strict=True)]
        if any(not 0 <= move.group < len(self._groups) for move in moves):
            raise TransferError("there is no such group of state")
        return moves

    def _send(self, channel: Channel, request: Read) -> None:
        try:
            moves = self._moves(request.groups, request.blocks, request.blocks)
            if any(not 0 < move.block < self._pages or move.block % self._spans[move.group] for move in moves):
                raise TransferError("there is no such block")
        except TransferError as error:
            channel.send(Refused(str(error)))
            return
        channel.deadline = time.monotonic() + self._settings.seconds
        nbytes = sum(self._groups[move.group].nbytes for move in moves)
        channel.send(Data(nbytes))
        for group, part in self._pieces(moves):
            rows = self._export(group, [move.block for move in part])
            channel.send_bytes(memoryview(rows.view(-1).numpy()))
        with self._lock:
            self._counters["kv_transfer_sent_bytes"] += nbytes

    def _export(self, group: ExportedBlocks, blocks: list[int]) -> torch.Tensor:
        """The blocks in host memory: uint8 [n, nbytes]."""
        self._device.select()
        with torch.inference_mode(), _own_stream(self._device):
            rows = torch.zeros(len(blocks), group.nbytes, dtype=torch.uint8, device=self._device.torch_device)
            group.read(blocks, rows)
            return self._device.readback(rows).wait()

    def _fetch(self, request: Fetch) -> None:
        peer = Address(request.host, request.port)
        if peer not in self._settings.peers:
            raise TransferError("the address is not in offload.kv_peers")
        moves = self._moves(request.groups, request.blocks, request.places)
        nbytes = sum(self._groups[move.group].nbytes for move in moves)
        with self._lock:
            if self._arriving + nbytes > self._settings.nbytes:
                raise TransferError(f"{nbytes} more bytes do not fit offload.kv_landing_bytes={self._settings.nbytes}")
            self._arriving += nbytes
            self._expected.update(request.places)
        found: dict[int, torch.Tensor] = {}
        try:
            data = self._read(peer, request, nbytes)
            sizes = [self._groups[move.group].nbytes for move in moves]
            # A rank without layers of a group has nothing of it, and no plan takes that.
            rows = zip(request.places, data.split(sizes), strict=True)
            found = {place: row for place, row in rows if row.nbytes}
        finally:
            with self._lock:
                self._rows |= {place: row for place, row in found.items() if place in self._expected}
                self._arriving -= nbytes - sum(row.nbytes for place, row in found.items() if place in self._expected)
                self._expected.difference_update(request.places)
        with self._lock:
            self._counters["kv_transfer_received_bytes"] += nbytes

    def _read(self, peer: Address, request: Fetch, nbytes: int) -> torch.Tensor:
        deadline = time.monotonic() + min(request.seconds, self._settings.seconds)
        with connect(peer.of_rank(self._rank), self._settings.key, deadline) as channel:
            found = channel.ask(Read(request.groups, request.blocks), Data)
            if found.nbytes != nbytes:
                raise TransferError(f"the blocks have {found.nbytes} bytes there and {nbytes} here")
            data = torch.empty(nbytes, dtype=torch.uint8)
            channel.receive_into(memoryview(data.numpy()))
        return data

    def _drop(self, places: Sequence[int]) -> None:
        with self._lock:
            self._expected.difference_update(places)
            rows = [self._rows.pop(place, None) for place in places]
            self._arriving -= sum(row.nbytes for row in rows if row is not None)


def _own_stream(device: Device) -> Any:
    """A stream beside the steps', if the device has more than one queue."""
    try:
        return contextlib.nullcontext() if device.capabilities.host_memory else device.new_stream()
    except NotImplementedError:
        return contextlib.nullcontext()
