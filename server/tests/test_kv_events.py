"""Events of the prefix cache, heard by a subscriber that knows nothing but vLLM's schema."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.media import make_item
from evener.contracts.state import StateSpec, StateTensor
from evener.engine.controller.state import StateManager
from evener.errors import ConfigError
from evener_server import kv_events
from evener_server.kv_events import KvEvents

KINDS = {kind.name: kind for kind in BUILTIN_KINDS}
TENSORS = (StateTensor("key", (1, 2), "float32"),)
FULL = StateSpec("full", TENSORS)
WINDOW = StateSpec("window", TENSORS, window=4)
BLOCK = 4


class Event(msgspec.Struct, tag=True):
    """vLLM 0.33, vllm/distributed/kv_events.py: maps with the name of the class as ``type``."""


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Receives batches, and asks for those of before."""

    def __init__(self, events: KvEvents, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(events.addresses[0])

    def receive(self) -> tuple[bytes, int, Batch]:
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)

    def close(self) -> None:
        self.context.destroy(0)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[StateManager, KvEvents, Subscriber]]]:
    """A state manager of few blocks, its events, and a subscriber that hears them from the first on."""
    closing: list[Any] = []

    def build(*specs: StateSpec, blocks: int = 9, topic: str = "") -> tuple[StateManager, KvEvents, Subscriber]:
        state = StateManager(specs or (FULL,), KINDS, BLOCK, blocks)
        groups = [(spec.kind, spec.window) for spec in state.specs]
        events = KvEvents("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic, BLOCK, groups)
        subscriber = Subscriber(events, topic)
        closing.extend((events, subscriber))
        # Messages are lost until the two are connected, so one is repeated until it comes.
        subscriber.socket.setsockopt(zmq.RCVTIMEO, 50)
        while True:
            events.cleared()
            try:
                subscriber.receive()
                break
            except zmq.Again:
                continue
        subscriber.socket.setsockopt(zmq.RCVTIMEO, 300)
        try:
            while True:
                subscriber.receive()
        except zmq.Again:
            subscriber.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        state.pool.listeners.append(events)
        return state, events, subscriber

    yield build
    for each in closing:
        each.close()


def compute(state: StateManager, tokens: list[int], salt: str = "", media: Any = ()) -> Any:
    """A request of these tokens, from its start to the read of its last step."""
    table, _ = state.open(tokens, salt, media=media)
    assert state.grow(table, len(tokens)) is not None
    state.commit(table, tokens, len(tokens))
    return table


def test_blocks_that_enter_the_cache_are_announced_with_their_tokens_and_their_parent(make: Any) -> None:
    state, _, subscriber = make()
    tokens = list(range(10, 20))
    table = compute(state, tokens[:4])
    _, first, batch = subscriber.receive()
    (one,) = batch.events
    assert isinstance(one, BlockStored) and batch.data_parallel_rank == 0 and batch.ts > 1.7e9
    assert (one.token_ids, one.parent_block_hash, one.block_size, one.medium) == (tokens[:4], None, 4, "GPU")
    assert one.block_hashes == [int.from_bytes(table.digests[0], "big") & 0xFFFF_FFFF_FFFF_FFFF]
    compute(state, tokens)  # its first block is a hit, and is not announced again
    _, second, batch = subscriber.receive()
    (two,) = batch.events
    assert isinstance(two, BlockStored) and second == first + 1
    assert (two.token_ids, two.parent_block_hash) == (tokens[4:8], one.block_hashes[0])
    assert two.group_idx is None


def test_a_prompt_of_several_blocks_is_one_event_and_every_server_gives_its_blocks_the_same_hashes(make: Any) -> None:
    tokens, seen = list(range(12)), []
    for _ in range(2):
        state, _, subscriber = make()
        compute(state, tokens)
        (event,) = subscriber.receive()[2].events
        assert event.token_ids == tokens and len(set(event.block_hashes)) == 3
        seen.append(event.block_hashes)
    assert seen[0] == seen[1]


def test_a_block_that_is_given_out_again_is_removed(make: Any) -> None:
    state, _, subscriber = make(blocks=3)  # two blocks beside the null block
    state.close(compute(state, [1, 2, 3, 4]))
    (stored,) = subscriber.receive()[2].events
    compute(state, [5] * 8)
    _, _, batch = subscriber.receive()
    removed, new = batch.events
    assert isinstance(removed, BlockRemoved) and removed.block_hashes == stored.block_hashes
    assert isinstance(new, BlockStored) and new.token_ids == [5] * 8


def test_an_emptied_cache_is_said_and_blocks_are_announced_anew_after_it(make: Any) -> None:
    state, _, subscriber = make()
    state.close(compute(state, [1, 2, 3, 4]))
    (stored,) = subscriber.receive()[2].events
    state.pool.clear_keys()
    assert subscriber.receive()[2].events == [AllBlocksCleared()]
    compute(state, [1, 2, 3, 4])
    assert subscriber.receive()[2].events == [stored]


def test_blocks_that_depend_on_more_than_their_ids_are_neither_announced_nor_removed(make: Any) -> None:
    import numpy as np

    state, _, subscriber = make(blocks=3)
    state.close(compute(state, [1, 2, 3, 4], salt="tenant"))
    state.close(compute(state, [1, 2, 3, 4], media=[make_item(1, np.zeros((2, 8), np.float32))]))
    compute(state, [7] * 8)  # evicts both
    (only,) = subscriber.receive()[2].events
    assert isinstance(only, BlockStored) and only.token_ids == [7] * 8


def test_groups_of_state_are_told_apart_by_number_and_by_vllms_names(make: Any) -> None:
    state, _, subscriber = make(FULL, WINDOW, blocks=20)
    compute(state, list(range(8)))
    stored = subscriber.receive()[2].events
    kinds = {(each.group_idx, each.kv_cache_spec_kind, each.kv_cache_spec_sliding_window) for each in stored}
    assert kinds == {(0, "full_attention", None), (1, "sliding_window", 4)}


def test_a_subscriber_that_missed_batches_gets_them_again(make: Any) -> None:
    state, events, subscriber = make(topic="kv@pod")
    for start in (0, 100, 200):
        compute(state, list(range(start, start + 4)))
        topic, last, _ = subscriber.receive()
        assert topic == b"kv@pod"
    late = zmq.Context()
    dealer = late.socket(zmq.DEALER)  # what vLLM's example uses as REQ, but it takes several answers to one question
    dealer.setsockopt(zmq.RCVTIMEO, 60_000)
    dealer.connect(events.addresses[1])
    dealer.send_multipart([b"", b"wrong"])  # is ignored
    dealer.send_multipart([b"", (last - 1).to_bytes(8, "big")])
    answers = [dealer.recv_multipart() for _ in range(3)]
    late.destroy(0)
    assert [int.from_bytes(each[1], "big", signed=True) for each in answers] == [last - 1, last, -1]
    tokens = [msgspec.msgpack.decode(each[2], type=Batch).events[0].token_ids for each in answers[:2]]  # type: ignore[union-attr]
    assert tokens == [[100, 101, 102, 103], [200, 201, 202, 203]] and answers[2][2] == b""


def hold_back(events: KvEvents, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the thread send nothing until the returned event is set."""
    held, go_on, send = threading.Event(), threading.Event(), events._send_waiting

    def hold() -> None:
        held.set()
        assert go_on.wait(60)
        send()

    monkeypatch.setattr(events, "_send_waiting", hold)
    assert held.wait(60)
    return go_on


def test_a_full_list_becomes_one_event_that_all_is_forgotten_and_no_step_waits(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, events, subscriber = make(blocks=40)
    monkeypatch.setattr(kv_events, "MAX_WAITING", 3)
    go_on = hold_back(events, monkeypatch)
    for start in range(0, 500, 100):
        compute(state, list(range(start, start + 4)))
    go_on.set()
    received = subscriber.receive()[2].events
    assert received[0] == AllBlocksCleared()
    assert [each.token_ids[0] for each in received[1:]] == [400]
    assert "routers are told to forget all blocks" in caplog.text


def test_after_a_full_list_a_block_that_is_announced_is_also_removed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, events, subscriber = make(blocks=5)
    monkeypatch.setattr(kv_events, "MAX_WAITING", 1)
    go_on = hold_back(events, monkeypatch)
    for start in (0, 100):
        state.close(compute(state, list(range(start, start + 4))))
    monkeypatch.setattr(kv_events, "MAX_WAITING", 100)
    compute(state, [7] * 16)  # takes all blocks
    go_on.set()
    there: set[Any] = set()
    for event in subscriber.receive()[2].events:
        if isinstance(event, AllBlocksCleared):
            there.clear()
        elif isinstance(event, BlockStored):
            there |= set(event.block_hashes)
        else:
            there -= set(event.block_hashes)
    assert there == {kv_events.block_hash(digest) for _, digest in state.pool._by_key}  # type: ignore[misc]


class Asker:
    """Asks the replay socket, as who connects to it may."""

    def __init__(self, events: KvEvents) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 100)  # nobody reads once the events are closed
        self.socket.connect(events.addresses[1])

    def ask(self, first: int) -> None:
        self.socket.send_multipart([b"", first.to_bytes(8, "big")])


@pytest.fixture
def ask(make: Any) -> Iterator[tuple[StateManager, KvEvents, Asker]]:
    state, events, _ = make()
    asker = Asker(events)
    yield state, events, asker
    asker.context.destroy(0)


def test_a_replay_has_all_batches_that_are_kept_and_its_end_though_the_subscriber_reads_late(ask: Any) -> None:
    _, events, asker = ask
    first = events._next
    with events._lock:  # the thread waits meanwhile
        events._kept.extend((first + n, bytes(1000)) for n in range(5000))
    asker.ask(first)
    time.sleep(0.5)
    numbers = [int.from_bytes(asker.socket.recv_multipart()[1], "big", signed=True) for _ in range(5001)]
    assert numbers == [*range(first, first + 5000), -1]


def test_who_asks_without_end_keeps_neither_events_nor_the_end_of_the_engine_waiting(ask: Any) -> None:
    _, events, asker = ask
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                asker.ask(0)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.2)
        before = events._next
        events.cleared()
        until = time.monotonic() + 60
        while events._next == before and time.monotonic() < until:
            time.sleep(0.01)
        assert events._next == before + 1
        closing = threading.Thread(target=events.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    finally:
        stop.set()
        thread.join()


def test_a_large_message_to_the_sockets_is_not_read(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, events, asker = ask
    asker.socket.send_multipart([b"", bytes(1 << 20)])
    time.sleep(0.3)
    other = Asker(events)
    other.ask(1 << 40)
    assert other.socket.recv_multipart()[1] == kv_events._END
    other.context.destroy(0)
    assert "is not an empty part and a number of 8 bytes" not in caplog.text, "it was read"


def test_an_address_that_is_taken_is_an_error_that_names_the_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"server\.kv_events={address} cannot be used.*as in tcp://"):
            KvEvents(address, None, "", BLOCK, [("full", None)])
        with pytest.raises(ConfigError, match=r"server\.kv_events_replay=nonsense cannot be used"):
            KvEvents("tcp://127.0.0.1:*", "nonsense", "", BLOCK, [("full", None)])
