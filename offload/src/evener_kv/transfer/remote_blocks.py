"""The controller's half: blocks that this server holds for others, and those that it fetches from them.

- A request that another server goes on with (``HOLD``) leaves its blocks held for a while when it ends. A thread tells
  that server which they are.
- A request whose prompt another server has computed (``HOST:PORT/REQUEST``) waits while a thread asks that server which
  blocks it holds, lets the own ranks read them, and asks whether they were held all the time. Then the request gets
  blocks of the pool, and the next plan copies into them what the ranks have. It starts with an ordinary hit of the
  prefix cache. If anything goes wrong, it starts without, and its prompt is computed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from evener.contracts.connector import BlockMove, BlockMoves, BlockTransfer, Connector, StartingRequest
from evener.engine.controller.blocks import CacheListener
from evener.engine.controller.state import StateManager
from evener_kv.transfer.connection import Channel, TransferError, TransferServer, connect
from evener_kv.transfer.held_blocks import HeldBlocks, Key
from evener_kv.transfer.messages import (
    Done,
    Drop,
    Fetch,
    Found,
    Lookup,
    Refused,
    Release,
    Released,
    Request,
)
from evener_kv.transfer.settings import Address, TransferSettings

log = logging.getLogger("evener.kv")
#: What a request says whose blocks another server wants.
HOLD = "hold"
#: Requests at a time whose blocks are fetched; the others wait for their turn.
AT_A_TIME = 8
#: Blocks of one prompt; a longer one is not fetched.
_MOST_BLOCKS = 1 << 16
#: Seconds that an engine without other work waits before it looks again; and between two warnings of one kind.
_PAUSE, _QUIET = 0.002, 10.0
_DIGEST = 32


@dataclass
class _Fetch:
    """What one request waits for.

    Attributes:
        have: for each group, which of ``digests`` the device has.
        places: where the ranks keep what was fetched; set before ``over``.
        blocks: what the request holds of the pool, once the next plan copies into them.
        columns, tokens: its prefix in blocks, and the tokens of it that came from the other server.
        until: when it starts without them; begun: whether a thread is at it.
    """

    request: str
    source: str
    digests: list[bytes]
    have: list[list[bool]]
    until: float
    begun: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    places: dict[Key, int] = field(default_factory=dict)
    dropped: bool = False
    loaded: bool = False
    blocks: list[int] = field(default_factory=list)
    columns: int = 0
    tokens: int = 0


class RemoteBlocks(Connector, CacheListener):
    """Shares blocks of ``state`` with the peers of ``settings`` that have the same ``fingerprint``; ``ranks``: how many
    this server has.

    Attributes:
        unwritten: blocks of the pool with keys whose contents come with the next plan.
        kept: finds what this server has of a key beside the pool, and will load by itself; then it is not fetched.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, state: StateManager, settings: TransferSettings, fingerprint: str, ranks: int) -> None:
        self._state, self._pool, self._settings = state, state.pool, settings
        self._fingerprint, self._ranks = fingerprint, range(ranks)
        self._held = HeldBlocks(state.pool, settings.hold_seconds)
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._counted = Counter[str](kv_transfer_held=0, kv_transfer_hits=0, kv_transfer_hit_tokens=0,
                                     kv_transfer_failures=0)  # fmt: skip
        self.counters = self._counted
        #: By request, from the first time that it might start until it ends.
        self._fetches: dict[str, _Fetch] = {}
        #: For the next plan: what each fetch copies to the device.
        self._back: list[list[tuple[Key, BlockMove]]] = []
        self.unwritten: set[int] = set()
        self.kept: Callable[[Key], int | None] = lambda key: None
        self._next_transfer = 0
        self._quiet_until: dict[str, float] = {}
        self._running = 0
        #: For each rank, places that it could not be told to forget.
        self._undropped: list[list[int]] = [[] for _ in self._ranks]
        self._server = TransferServer((settings.own.host, settings.own.port), settings.key, self._answer)
        state.pool.listeners.append(self)

    def close(self) -> None:
        self._server.close()

    # What the scheduler calls.

    def ready(self, request: StartingRequest, busy: bool) -> bool:
        return self.arrived(request, busy) and self.load(request, busy)

    def arrived(self, request: StartingRequest, busy: bool) -> bool:
        """Whether a waiting request waits for no other server; from the first time on, its blocks are fetched."""
        self._held.expire()
        if request.exclusive:  # nobody may hold a block when it starts
            while self.give_back():
                pass
            return True
        fetch = self._fetches.get(request.id)
        if fetch is None:
            if (begun := self._begin(request)) is None:
                return True
            fetch = begun
        if not (fetch.loaded or fetch.over.is_set()):
            if time.monotonic() < fetch.until:
                if not fetch.begun and self._running < AT_A_TIME:
                    fetch.begun = True
                    with self._lock:
                        self._running += 1
                    _in_thread(self._run, fetch)
                if not busy:
                    fetch.over.wait(_PAUSE)
                return False
            self._give_up(fetch, "it took too long")
        return True

    def load(self, request: StartingRequest, busy: bool) -> bool:
        """Whether a request for which everything has ``arrived`` may start. If blocks are free, the next plan copies
        what was fetched to them."""
        fetch = self._fetches.get(request.id)
        if fetch is None or fetch.loaded or request.exclusive:
            return True
        # Later it keeps its turn, as a request does that fetches nothing: others must not pass it for ever.
        return self._load(fetch) or not busy or time.monotonic() >= fetch.until

    def started(self, request: StartingRequest) -> None:
        fetch = self._fetches.get(request.id)
        if fetch is not None and fetch.blocks:
            if request.table.cached_blocks >= fetch.columns:
                self._counted.update(kv_transfer_hits=1, kv_transfer_hit_tokens=fetch.tokens)
            self._release(fetch)

    def dropped(self, request: StartingRequest) -> None:
        fetch = self._fetches.pop(request.id, None)
        if fetch is not None:
            fetch.dropped = True
            self._release(fetch)
            if fetch.over.is_set():
                self._forget(fetch)
        self._hold(request)

    def give_back(self) -> bool:
        waiting = [fetch for fetch in self._fetches.values() if fetch.blocks]
        for fetch in waiting:
            self._release(fetch)
        return bool(waiting) or self._held.release_oldest()

    def moves(self) -> BlockMoves | None:
        self._held.expire()
        back, stale = list[BlockTransfer](), list[int]()
        for planned in self._back:
            # A block may have been released and taken for something else since.
            moves = [move for key, move in planned if self._pool.find(key) == move.block]
            stale += [move.place for key, move in planned if self._pool.find(key) != move.block]
            if moves:
                back.append(BlockTransfer(self._next_transfer, moves))
                self._next_transfer += 1
        self._back = []
        self.unwritten.clear()
        if stale:
            _in_thread(self._drop, stale)
        return BlockMoves(back=back, waits=[each.id for each in back]) if back else None

    # Blocks for others.

    def _hold(self, request: StartingRequest) -> None:
        message, state = request.message, self._state
        columns = prompt_blocks(message.prompt, state.block_size)
        if message.transfer != HOLD or request.table is None or request.table.cached_blocks < columns:
            return
        digests = request.table.digests[:columns]
        hit = state.longest_hit(digests, self._pool.find)
        self._held.hold(request.id, list(self._keys(digests[:hit])))
        self._counted["kv_transfer_held"] += hit > 0

    def _keys(self, digests: Sequence[bytes]) -> Iterator[Key]:
        """The keys of the blocks that the token after this prefix needs."""
        size = len(digests) * self._state.block_size
        for group in range(len(self._state.specs)):
            for digest in digests[self._state.first_live_block(group, size) :]:
                yield group, digest

    def _answer(self, channel: Channel, request: Request) -> None:
        if isinstance(request, Lookup):
            count, rest = divmod(len(request.digests), _DIGEST)
            if request.fingerprint != self._fingerprint:
                why = ("the servers differ in what their state depends on: model, dtype, quantization, KV cache dtype, "
                       "block size, infer.max_seq_len or ranks")  # fmt: skip
                channel.send(Refused(why))
            elif rest or count > _MOST_BLOCKS:
                channel.send(Refused(f"{len(request.digests)} bytes of digests"))
            else:
                digests = [request.digests[at : at + _DIGEST] for at in range(0, count * _DIGEST, _DIGEST)]
                channel.send(Found(*self._held.find(request.request, len(self._state.specs), digests)))
        elif isinstance(request, Release):
            channel.send(Released(self._held.end(request.reading)))
        else:
            channel.send(Refused("that is for a rank"))

    # Blocks of others.

    def _begin(self, request: StartingRequest) -> _Fetch | None:
        """Begin to fetch what another server has of the request's prompt; None: nothing is to be fetched."""
        message, state = request.message, self._state
        forks = request.parent is not None and request.parent.finish is None
        if not message.transfer or message.transfer == HOLD or request.needs_whole_prompt or forks:
            return None
        until = time.monotonic() + self._settings.seconds
        fetch = self._fetches[request.id] = _Fetch(request.id, message.transfer, [], [], until)
        table = state.new_table(message.cache_salt, message.media)
        columns = prompt_blocks(request.tokens, state.block_size)
        state.extend_digests(table, request.tokens, columns)
        fetch.digests = table.digests
        groups = range(len(state.specs))

        def here(key: Key) -> int | None:
            return self._pool.find(key) or self.kept(key)

        fetch.have = [[here((group, digest)) is not None for digest in table.digests] for group in groups]
        if state.longest_hit(fetch.digests, here) == columns:
            fetch.over.set()
        elif message.adapter or columns > _MOST_BLOCKS:
            what = "adapters of two servers may differ" if message.adapter else f"the prompt has {columns} blocks"
            self._give_up(fetch, what)
        return fetch

    def _run(self, fetch: _Fetch) -> None:
        """In a thread."""
        places: dict[Key, int] = {}
        try:
            places = self._fetch(fetch)
        except TransferError as error:
            self._give_up(fetch, str(error))
        except Exception:
            log.exception("fetching KV blocks failed")
            self._give_up(fetch, "of an error that was logged")
        with self._lock:
            self._running -= 1
            late = fetch.over.is_set()
            if not late:
                fetch.places = places
                fetch.over.set()
        if places and (late or fetch.dropped):
            self._drop(list(places.values()))

    def _fetch(self, fetch: _Fetch) -> dict[Key, int]:
        """Ask the other server, let the own ranks read, and ask again. Returns where they keep the blocks.

        Raises:
            TransferError: it did not work.
        """
        source, _, request = fetch.source.partition("/")
        peer = Address.parse(source)
        if peer is None or peer not in self._settings.peers:
            raise TransferError(f"{source[:100]!r} is not in offload.kv_peers")
        key, until = self._settings.key, fetch.until
        if time.monotonic() >= until or fetch.dropped:
            raise TransferError("it took too long")
        if any(self._undropped):
            self._drop([])
        with connect((peer.host, peer.port), key, until) as channel:
            found = channel.ask(Lookup(self._fingerprint, request, b"".join(fetch.digests)), Found)
            wanted = self._choose(fetch, found.blocks)
            places = {each: next(self._numbers) for each in wanted}
            try:
                self._read(peer, places, list(wanted.values()), until)
                if not channel.ask(Release(found.reading), Released).valid:
                    raise TransferError("it has released the blocks; raise its offload.kv_hold_seconds, or give it "
                                        "more infer.kv_memory")  # fmt: skip
            except TransferError:
                self._drop(list(places.values()))
                raise
        return places

    def _choose(self, fetch: _Fetch, blocks: list[list[int]]) -> dict[Key, int]:
        """The blocks to read, by key: those of the longest prefix that both servers have together, without those that
        this one has. Raises ``TransferError`` if that is nothing."""
        columns, state = {digest: at for at, digest in enumerate(fetch.digests)}, self._state
        if len(blocks) != len(state.specs) or any(len(group) != len(fetch.digests) for group in blocks):
            raise TransferError("its answer has other groups of state")

        def find(key: Key) -> int | None:
            group, column = key[0], columns[key[1]]
            return 1 if fetch.have[group][column] else blocks[group][column] or None

        hit = state.longest_hit(fetch.digests, find)
        wanted = {key: blocks[key[0]][columns[key[1]]] for key in self._keys(fetch.digests[:hit])
                  if not fetch.have[key[0]][columns[key[1]]]}  # fmt: skip
        if not wanted:
            raise TransferError("it holds no more blocks of this prompt; raise its offload.kv_hold_seconds, or give it "
                                "more infer.kv_memory")  # fmt: skip
        return wanted

    def _read(self, peer: Address, places: dict[Key, int], blocks: list[int], until: float) -> None:
        """All ranks at the same time read their parts."""
        groups = [group for group, _ in places]
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(connect(self._settings.own.of_rank(rank), self._settings.key, until))
                for rank in self._ranks
            ]
            seconds = max(0.001, until - time.monotonic())
            for rank in ranks:
                rank.send(Fetch(peer.host, peer.port, seconds, list(places.values()), groups, blocks))
            for rank in ranks:
                rank.answer(Done)

    def _give_up(self, fetch: _Fetch, why: str) -> None:
        with self._lock:
            if fetch.over.is_set():
                return
            self._counted["kv_transfer_failures"] += 1
            now = time.monotonic()
            loud, self._quiet_until[why] = now >= self._quiet_until.get(why, now), now + _QUIET
            if len(self._quiet_until) > 100:
                self._quiet_until.clear()
            fetch.over.set()
        if loud and not fetch.dropped:
            log.warning("request %r: its KV blocks are not fetched from %r, because %s; its prompt is computed here",
                        fetch.request[:100], fetch.source[:100], why)  # fmt: skip

    def _load(self, fetch: _Fetch) -> bool:
        """Hold blocks for what was fetched, and plan the copies. False: too few blocks are free now."""
        state = self._state
        found = state.longest_hit(fetch.digests, lambda key: self._pool.find(key) or fetch.places.get(key))
        here = state.longest_hit(fetch.digests, self._pool.find)
        if found <= here:
            fetch.loaded = True
            self._forget(fetch)
            return True
        keys = list(self._keys(fetch.digests[:found]))
        held = [block for key in keys if (block := self._pool.find(key)) is not None]
        missing = [key for key in keys if self._pool.find(key) is None]
        self._pool.retain(held)
        by_group = [[key for key in missing if key[0] == group] for group in range(len(state.specs))]
        counts = [(len(group), span) for group, span in zip(by_group, state.spans, strict=True)]
        taken = self._pool.allocate_all(counts)
        if taken is None:
            self._pool.release(reversed(held))
            return False
        moves = list[tuple[Key, BlockMove]]()
        for group, blocks in zip(by_group, taken, strict=True):
            for key, block in zip(group, blocks, strict=True):
                self._pool.set_key(block, key)
                moves.append((key, BlockMove(key[0], block, fetch.places.pop(key))))
            held += blocks
        self._back.append(moves)
        self.unwritten.update(move.block for _, move in moves)
        fetch.blocks, fetch.columns, fetch.tokens = held, found, (found - here) * state.block_size
        fetch.loaded = True
        self._forget(fetch)  # fetched blocks that are not needed
        return True

    def _release(self, fetch: _Fetch) -> None:
        blocks, fetch.blocks = fetch.blocks, []
        self._pool.release(reversed(blocks))

    def _forget(self, fetch: _Fetch) -> None:
        places, fetch.places = list(fetch.places.values()), {}
        if places:
            _in_thread(self._drop, places)

    def _drop(self, places: list[int]) -> None:
        """Let the ranks forget these places, and those of which they could not be told before. In a thread."""
        for rank in self._ranks:
            with self._lock:
                gone, self._undropped[rank] = [*self._undropped[rank], *places], []
            try:
                with connect(self._settings.own.of_rank(rank), self._settings.key, _soon()) as own:
                    own.ask(Drop(gone), Done)
            except TransferError:
                with self._lock:
                    self._undropped[rank] += gone


def prompt_blocks(tokens: Sequence[int], block_size: int) -> int:
    """Full blocks of a prompt that may be reused: its last token is always computed."""
    return (len(tokens) - 1) // block_size


def _in_thread(work: Callable[..., None], *given: object) -> None:
    """A process that ends does not wait for it."""
    threading.Thread(target=work, args=given, name="evener-kv-fetch", daemon=True).start()


def _soon() -> float:
    return time.monotonic() + 5.0
