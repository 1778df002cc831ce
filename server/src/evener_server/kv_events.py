"""Events of the prefix cache for routers, in vLLM's form: which blocks of tokens this server can reuse.

A router that knows the blocks of each server sends a prompt where most of it is cached. The form is that of vLLM 0.33
(``vllm/distributed/kv_events.py``): over a ZMQ PUB socket come messages of three parts: the topic, a sequence number
(8 bytes, big endian, without gaps), and a batch in msgpack, ``[time, events, 0]``. An event is a map with a ``type``:
``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared``. A block's hash is the last 8 bytes of its sha256 digest, as
an unsigned integer; it depends on nothing but token ids, so servers with equal block sizes agree on it.

A subscriber that sees a gap asks the replay socket (ROUTER) with the first number that it lacks, and gets the batches
from there on that are still kept, as fast as it reads them, then the number -1 and an empty part.

Blocks whose state depends on more than token ids (a ``cache_salt``, an adapter, media) are not announced: a router
would take them for those of the plain tokens.

The engine never waits. Events go to a list of bounded length, which a thread sends. If the list is full, it is replaced
by ``AllBlocksCleared``: subscribers then know too little, but nothing wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import zmq

from evener.config.schema import Config
from evener.engine.controller.blocks import CacheListener
from evener.engine.facts.worker_facts import WorkerFacts
from evener.errors import ConfigError
from evener_server.options import ServerOptions

logger = logging.getLogger(__name__)

#: Events that may wait for the thread.
MAX_WAITING = 100_000
#: Batches, and bytes of them, that are kept for replays.
KEPT_BATCHES, KEPT_BYTES = 10_000, 64 << 20
#: Seconds between two looks at the replay socket while no event comes, and while a replay is under way.
_REPLAY_INTERVAL, _BUSY_INTERVAL = 0.05, 0.005
#: Anybody who reaches the sockets may send anything: the bytes of a message, the replays at a time, and the batches of
#: one that wait to be read.
_MAX_MESSAGE, _MAX_REPLAYS, _UNREAD = 1024, 32, 128
_END = (-1).to_bytes(8, "big", signed=True)
#: vLLM's names of the kinds of state.
_KINDS = {"full": "full_attention", "latent": "mla_attention", "window": "sliding_window"}


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    """Blocks that follow each other entered the cache, with all their tokens; the field names are vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    #: The device's memory, whatever the device.
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """The cache is empty."""


class KvEvents(CacheListener):
    """Publishes what it hears.

    Args:
        address, replay: ZMQ addresses to listen on; ``replay`` may be None.
        topic: the first part of each message.
        block_size: tokens of a block.
        groups: for each group of state its kind by evener's name, and its window or None.

    Attributes:
        addresses: what it listens on, ports filled in.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(
        self, address: str, replay: str | None, topic: str, block_size: int, groups: Sequence[tuple[str, int | None]]
    ) -> None:
        self._topic, self._block_size = topic.encode(), block_size
        self._groups = [(None, None, None)] if len(groups) == 1 else [
            (index, _KINDS.get(kind, kind), window) for index, (kind, window) in enumerate(groups)
        ]  # fmt: skip
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._warned = False
        self._waiting: list[_Event] = []
        self._known: set[Hashable] = set()
        self._kept, self._kept_bytes, self._next = deque[tuple[int, bytes]](), 0, 0
        #: Who gets a replay, and the first number that was not sent to them yet; the oldest first.
        self._replays: dict[bytes, int] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._publisher, self._replay = self._context.socket(zmq.PUB), None
        self._bind(self._publisher, "server.kv_events", address)
        if replay is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            # Who reads slowly is known, so that no batch is left out for them, and no copies wait for them.
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._replay.setsockopt(zmq.SNDHWM, _UNREAD)
            self._replay.copy_threshold = 0
            self._bind(self._replay, "server.kv_events_replay", replay)
        sockets = filter(None, (self._publisher, self._replay))
        self.addresses = [str(socket.getsockopt_string(zmq.LAST_ENDPOINT)) for socket in sockets]
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, socket: zmq.Socket[bytes], key: str, address: str) -> None:
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"{key}={address} cannot be used: {error}; give an address to listen on, as in "
                              "tcp://127.0.0.1:5557") from error  # fmt: skip

    def stored(self, key: Hashable, parent: bytes | None, tokens: Sequence[int], plain: bool) -> None:
        if plain:
            group, digest = _parts(key)
            self._known.add(key)
            before = None if parent is None else block_hash(parent)
            self._put(BlockStored([block_hash(digest)], before, list(tokens), self._block_size, None, "GPU", None,
                                  *self._groups[group]))  # fmt: skip

    def removed(self, block: int, key: Hashable) -> None:
        del block
        if key in self._known:
            group, digest = _parts(key)
            self._known.remove(key)
            self._put(BlockRemoved([block_hash(digest)], "GPU", self._groups[group][0]))

    def cleared(self) -> None:
        self._known.clear()
        self._put(AllBlocksCleared())

    def close(self) -> None:
        """Send what waits, and stop."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _put(self, event: _Event) -> None:
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                logger.warning("%d events of the prefix cache wait to be sent: routers are told to forget all blocks",
                               len(self._waiting))  # fmt: skip
                self._waiting = [AllBlocksCleared()]
                self._known.clear()  # also of the block of this event, which subscribers do not hear of
                return
            self._waiting.append(event)
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            pause = _BUSY_INTERVAL if self._replays else _REPLAY_INTERVAL
            self._wake.wait(None if self._replay is None else pause)
            self._wake.clear()
            self._send_waiting()
            if self._replay is not None:
                self._read_requests(self._replay)
                for client in list(self._replays):
                    self._repeat(self._replay, client)
        self._send_waiting()
        self._context.destroy(0)

    def _send_waiting(self) -> None:
        with self._lock:
            events, self._waiting = self._waiting, []
        if not events:
            return
        number, batch = self._next, self._encode([time.time(), merged(events), 0])
        self._next += 1
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        # A PUB socket never blocks: it leaves messages out for subscribers that are too slow, who see the gap.
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), batch))

    def _read_requests(self, socket: zmq.Socket[bytes]) -> None:
        """Note who asks for a replay: a bounded number at a time, so that events do not wait for them."""
        for _ in range(_MAX_REPLAYS):
            if not socket.poll(0):
                return
            client, *request = socket.recv_multipart()
            if len(request) != 2 or len(request[1]) != 8:
                if not self._warned:
                    logger.warning("a request for a replay is not an empty part and a number of 8 bytes: it and others "
                                   "like it are ignored")  # fmt: skip
                self._warned = True
                continue
            self._replays[client] = int.from_bytes(request[1], "big")
            if len(self._replays) > _MAX_REPLAYS:
                del self._replays[next(iter(self._replays))]

    def _repeat(self, socket: zmq.Socket[bytes], client: bytes) -> None:
        """Send a client what it takes now, and the end after the last batch."""
        first = self._replays[client]
        oldest = self._kept[0][0] if self._kept else first
        try:
            for number, batch in islice(self._kept, max(0, first - oldest), None):
                parts = client, b"", number.to_bytes(8, "big"), batch
                socket.send_multipart(parts, zmq.DONTWAIT, copy=False)
                self._replays[client] = number + 1
            socket.send_multipart((client, b"", _END, b""), zmq.DONTWAIT)
        except zmq.Again:
            return  # it goes on when the client has read
        except zmq.ZMQError as error:
            logger.debug("a replay ends: %s", error)  # the client is gone
        del self._replays[client]


def merged(events: Iterable[_Event]) -> list[_Event]:
    """The same events, with blocks that follow each other in one."""
    found: list[_Event] = []
    for event in events:
        last = found[-1] if found else None
        if (
            isinstance(event, BlockStored) and isinstance(last, BlockStored)
            and event.parent_block_hash == last.block_hashes[-1] and event.group_idx == last.group_idx
        ):  # fmt: skip
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        elif isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and event.group_idx == last.group_idx:
            last.block_hashes += event.block_hashes
        else:
            found.append(event)
    return found


def block_hash(digest: bytes) -> int:
    """The last 64 bits of a block's digest, which is what vLLM publishes of its own."""
    return int.from_bytes(digest[-8:], "big")


def _parts(key: Any) -> tuple[int, bytes]:
    group, digest = key
    return group, digest


def open_kv_events(config: Config, facts: WorkerFacts) -> KvEvents | None:
    """What ``server.kv_events`` asks for; None: nothing.

    Raises:
        ConfigError: an address cannot be used, or there is no prefix cache.
    """
    options = ServerOptions.of(config.options)
    if options.kv_events is None:
        if options.kv_events_replay is not None:
            raise ConfigError("server.kv_events_replay needs server.kv_events: without it nothing is sent to repeat")
        return None
    if not config.infer.prefix_cache:
        raise ConfigError("server.kv_events tells of the prefix cache, and infer.prefix_cache is false; leave one out")
    groups = [(spec.kind, spec.window) for spec in facts.specs]
    events = KvEvents(options.kv_events, options.kv_events_replay, options.kv_events_topic, facts.block_size, groups)
    logger.info("events of the prefix cache at %s", ", replays at ".join(events.addresses))
    return events
