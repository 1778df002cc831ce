"""Prompts computed by one engine and answered by another: the tokens are those of the naive engine, and nothing that
was fetched is computed again."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served import eventually, free_port

from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Abort, NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.naive.model import NaiveModel
from evener_conformance.rank_threads import rank_threads
from evener_kv.block_bytes import ExportedBlocks
from evener_kv.shared import SharedMover
from evener_kv.transfer import remote_blocks
from evener_kv.transfer.connection import TransferError, connect
from evener_kv.transfer.messages import Done, Drop, Fetch, Found, Lookup, Read, Release, Released
from evener_kv.transfer.remote_blocks import RemoteBlocks
from evener_kv.transfer.settings import Address

from .counted import counters
from .pools import take

GREEDY = Sampling(temperature=0.0)
KEY = b"0123456789abcdef-key"


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """``started(config, own, peers)``: an engine that shares blocks; ``own`` and ``peers`` are ports."""
    (tmp_path / "key").write_bytes(KEY)
    engines: list[Controller] = []

    def start(config: Config, own: int, *peers: int, key: str = "key", **more: Any) -> Controller:
        addresses = ",".join(f"127.0.0.1:{port}" for port in peers)
        offload = {"kv_transfer": f"127.0.0.1:{own}", "kv_peers": addresses or None,
                   "kv_key_file": str(tmp_path / key), **more}  # fmt: skip
        controller, _ = build_controller(replace(config, options={**config.options, "offload": offload}))
        engines.append(controller)
        return controller

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(started: Any) -> Callable[..., tuple[Controller, Controller, str]]:
    """``pair(config)``: what computes prompts, what answers, and the address of the first."""

    def start(config: Config, second: Config | None = None, **more: Any) -> tuple[Controller, Controller, str]:
        one, two = free_port(4), free_port(4)
        producer = started(config, one, **more)
        return producer, started(second or config, two, one, **more), f"127.0.0.1:{one}"

    return start


def prompts() -> list[list[int]]:
    """Of different lengths, two of which begin alike."""
    noise = torch.Generator().manual_seed(2)
    made = [torch.randint(3, 90, (length,), generator=noise).tolist() for length in (44, 37, 64, 49)]
    made[3] = made[0][:33] + made[3][:16]
    return made


def hold(controller: Controller, play: Any, prompt: list[int], name: str = "p") -> int:
    """Compute a prompt for another engine. Returns its first token."""
    message = NewRequest(id=name, prompt=list(prompt), max_tokens=1, sampling=GREEDY, transfer="hold")
    (token,) = play(controller, [message]).tokens[name]
    return int(token)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("Llama", {}, {}),
    "full, small steps": ("Llama", {"infer.depth": 3, "infer.step_tokens": 9}, {}),
    "window": ("Gemma3", {}, {}),
    "latent": ("DeepseekV3", {}, {}),
    "latent in 8 bits": ("DeepseekV3", {"infer.kv_dtype": "fp8_e4m3"}, {"state_dtype": "float8_e4m3fn"}),
    "sparse": ("DeepseekV32", {"infer.step_tokens": 7}, {}),
    "recurrent": ("Qwen3Next", {"infer.snapshot_every": 16}, {}),
}


#: What other cases have too, each with something else beside it.
ALONE = ("full", "latent", "latent in 8 bits", "window", "sparse")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in ALONE else c for c in CASES])
def test_an_engine_goes_on_with_prompts_that_another_has_computed(
    case: str, make_lively: Any, play: Any, pair: Any
) -> None:
    family, options, choices = CASES[case]
    config = make_lively(family, **options)
    alone = NaiveModel(config.model, max_positions=128, **choices)
    first, second, address = pair(config)
    for index, prompt in enumerate(prompts()):
        token = hold(first, play, prompt, f"p{index}")
        message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p{index}")
        played = play(second, [message])
        assert played.tokens["d"] == alone.greedy(prompt, 9) and played.tokens["d"][0] == token
        assert played.cached["d"] == (len(prompt) - 1) // 16 * 16
    found = counters(second)
    assert found["kv_transfer_hits"] == 4 and found["kv_transfer_failures"] == 0
    computed = second.scheduler.stats.computed_tokens
    assert computed == sum((len(prompt) - 1) % 16 + 1 + 8 for prompt in prompts())
    first.scheduler.connector.moves()  # blocks that were read are released
    assert first.scheduler.state.pool.used == second.scheduler.state.pool.used == 0
    assert landing(second).counters()["kv_transfer_received_bytes"] > 0
    assert landing(second)._rows == {} and landing(second)._arriving == 0


def test_an_engine_without_its_peer_computes_the_prompt(
    make_lively: Any, play: Any, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_lively("Llama")
    first, second, address = pair(config, kv_transfer_seconds=5.0)
    prompt, alone = prompts()[0], NaiveModel(config.model, max_positions=128)

    def answers(source: str, why: str) -> None:
        before = counters(second)["kv_transfer_failures"]
        second.scheduler.state.pool.clear_keys()
        message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=source)
        assert play(second, [message]).tokens["d"] == alone.greedy(prompt, 9)
        assert counters(second)["kv_transfer_failures"] == before + 1
        # The thread that fetches gives up, and then says so.
        eventually(lambda: why in caplog.text)
        assert second.scheduler.state.pool.used == 0

    answers(f"{address}/p", "it holds no more blocks of this prompt")
    answers("127.0.0.1:1/p", "is not in offload.kv_peers")  # a request does not choose what is connected to
    answers("anything", "is not in offload.kv_peers")
    hold(first, play, prompt)
    first.close()
    answers(f"{address}/p", "the connection is lost")


def test_a_peer_that_says_nothing_is_waited_for_as_long_as_the_operator_says(
    make_lively: Any, play: Any, started: Any
) -> None:
    config, prompt = make_lively("Llama"), prompts()[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        engine = started(config, free_port(4), port, kv_transfer_seconds=0.3)
        source = f"127.0.0.1:{port}/p"
        engine.handle([NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=source)])
        engine.handle([NewRequest(id="other", prompt=prompts()[1], max_tokens=2, sampling=GREEDY)])
        ended = [event.id for _ in range(6) for event in engine.step() if type(event).__name__ == "Finished"]
        assert ended == ["other"] and [each.id for each in engine.scheduler.waiting] == ["d"]  # nobody waits with it
        played = play(engine, [NewRequest(id="last", prompt=[5], max_tokens=1, sampling=GREEDY)])
        assert played.tokens["d"] == NaiveModel(config.model, max_positions=128).greedy(prompt, 9)
        assert counters(engine)["kv_transfer_failures"] == 1


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(make_lively: Any, started: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        engine = started(make_lively("Llama"), free_port(4), port)
        source = f"127.0.0.1:{port}/p"
        engine.handle([NewRequest(id="d", prompt=prompts()[0], max_tokens=9, sampling=GREEDY, transfer=source)])
        engine.step()
        (end,) = engine.handle([Abort("d")])
        assert end.reason == "abort" and engine.idle and engine.scheduler.state.pool.used == 0  # type: ignore[union-attr]
        assert not engine.scheduler.connector._fetches  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "other", [{"infer.kv_dtype": "fp8_e5m2"}, {"infer.block_size": 32}, {"infer.max_seq_len": 120}, "weights"]
)
def test_state_of_another_kind_is_not_taken_over(
    other: Any, make_lively: Any, play: Any, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_lively("Llama")
    if other == "weights":
        changed = make_lively("Llama")
        path = Path(changed.model) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        changed = replace(config, infer=replace(config.infer, **{k.partition(".")[2]: v for k, v in other.items()}))
    first, second, address = pair(changed, config)
    prompt = prompts()[0]
    hold(first, play, prompt)
    message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")
    played = play(second, [message])
    assert played.tokens["d"] == NaiveModel(config.model, max_positions=128).greedy(prompt, 9)
    assert played.cached["d"] == 0
    eventually(lambda: "the servers differ in what their state depends on" in caplog.text)


def test_blocks_that_are_released_while_they_are_read_do_not_count(
    make_lively: Any, play: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, prompt = make_lively("Llama"), prompts()[0]
    first, second, address = pair(config)
    hold(first, play, prompt)
    read = RemoteBlocks._read

    def slow(self: RemoteBlocks, *args: Any) -> None:
        read(self, *args)
        while first.scheduler.connector.give_back():
            pass

    monkeypatch.setattr(RemoteBlocks, "_read", slow)
    message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")
    played = play(second, [message])
    assert played.tokens["d"] == NaiveModel(config.model, max_positions=128).greedy(prompt, 9)
    assert played.cached["d"] == 0 and counters(second)["kv_transfer_failures"] == 1
    assert landing(second)._rows == {} and landing(second)._arriving == 0


def test_blocks_are_held_until_they_are_needed_or_for_as_long_as_was_set(
    make_lively: Any, play: Any, started: Any
) -> None:
    engine = started(make_lively("Llama"), free_port(4), kv_hold_seconds=0.2)
    pool = engine.scheduler.state.pool
    hold(engine, play, prompts()[0])
    assert pool.used == 2
    time.sleep(0.25)
    engine.scheduler.connector.moves()
    assert pool.used == 0
    engine.scheduler.connector._held._seconds = 100.0
    hold(engine, play, prompts()[0])
    hold(engine, play, prompts()[1], "q")
    assert pool.used == 4
    taken = take(pool, pool.free - 4)
    # Six blocks are needed, and four are free: the blocks held for longest go first.
    message = NewRequest(id="long", prompt=[5 + i % 60 for i in range(80)], max_tokens=9, sampling=GREEDY)
    assert play(engine, [message]).reasons() == {"long": "length"}
    assert pool.used - len(taken) == 2 and len(engine.scheduler.connector._held) == 1


def test_fetched_state_waits_for_free_blocks(make_lively: Any, play: Any, pair: Any) -> None:
    config, prompt = make_lively("Llama"), prompts()[2]
    first, second, address = pair(config)
    hold(first, play, prompt)
    pool = second.scheduler.state.pool
    taken = take(pool, pool.free - 6)
    second.handle([NewRequest(id="long", prompt=[4], max_tokens=60, sampling=GREEDY)])
    second.step()
    more = take(pool, pool.free - 2)
    second.handle([NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")])
    until = time.monotonic() + 60
    while not second.scheduler.connector._fetches or not second.scheduler.connector._fetches["d"].over.is_set():
        second.scheduler.connector.ready(second.scheduler.waiting[0], True)
        assert time.monotonic() < until
    second.step()
    assert [each.id for each in second.scheduler.waiting] == ["d"] and len(landing(second)._rows) == 3
    pool.release(more + taken)
    played = play(second, [NewRequest(id="e", prompt=[5], max_tokens=1, sampling=GREEDY)])
    assert played.tokens["d"] == NaiveModel(config.model, max_positions=128).greedy(prompt, 9)
    assert played.cached["d"] == 48 and pool.used == 0 and landing(second)._rows == {}


def test_a_fetched_request_keeps_its_turn_when_its_time_is_over(make_lively: Any, play: Any, pair: Any) -> None:
    first, second, address = pair(make_lively("Llama"), kv_transfer_seconds=1.0)
    hold(first, play, prompts()[2])
    pool, connector = second.scheduler.state.pool, second.scheduler.connector
    take(pool, pool.free - 2)
    second.handle([NewRequest(id="d", prompt=prompts()[2], max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")])
    request, until = second.scheduler.waiting[0], time.monotonic() + 60
    while not connector._fetches or not connector._fetches["d"].over.is_set():
        connector.ready(request, True)
        assert time.monotonic() < until
    assert not connector.ready(request, True)  # others may pass it
    connector._fetches["d"].until = time.monotonic()
    assert connector.ready(request, True) and not connector._fetches["d"].loaded


def test_places_that_a_rank_could_not_be_told_to_forget_are_named_again(
    make_lively: Any, play: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, address = pair(make_lively("Llama"))
    connector, rank = second.scheduler.connector, landing(second)
    rank._rows[7] = torch.zeros(1, dtype=torch.uint8)
    rank._expected.add(7)
    with monkeypatch.context() as patch:
        patch.setattr(remote_blocks, "connect", lambda *given: (_ for _ in ()).throw(TransferError("full")))
        connector._drop([7])
    assert 7 in rank._rows
    hold(first, play, prompts()[0])
    message = NewRequest(id="d", prompt=prompts()[0], max_tokens=1, sampling=GREEDY, transfer=f"{address}/p")
    assert play(second, [message]).cached["d"] > 0
    assert rank._rows == {} and rank._expected == set()


#: Families, free blocks and bytes of host memory: few blocks with and without host memory.
FEW = (("Llama", 14, None), ("Gemma3", 9, 1 << 22))
EVERY = itertools.product(("Llama", "Gemma3"), (9, 14, 10_000), (None, 1 << 22))


@pytest.mark.parametrize(
    ("family", "free", "keeps"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in FEW)],
)
def test_many_prompts_at_once_in_a_small_pool_change_no_token(
    family: str, free: int, keeps: int | None, make_lively: Any, play: Any, pair: Any
) -> None:
    config = make_lively(family, **{"infer.depth": 2, "infer.kv_host_memory": keeps})
    alone = NaiveModel(config.model, max_positions=128)
    first, second, address = pair(config)
    for index, prompt in enumerate(prompts()):
        hold(first, play, prompt, f"p{index}")
    pool = second.scheduler.state.pool
    free = max(free, second.scheduler.state.slabs_for(80, 24) * pool.slab + 1)
    taken = take(pool, max(0, pool.free - free) // pool.slab)
    messages = [
        NewRequest(id=f"{way}{index}", prompt=prompt, max_tokens=12, sampling=GREEDY,
                   transfer=f"{address}/p{index}" if way == "there" else "")
        for way in ("there", "here") for index, prompt in enumerate(prompts())
    ]  # fmt: skip
    arrivals = {message.id: step for step, message in enumerate(messages)}
    played = play(second, messages, aborts={"there1": 3}, arrivals=arrivals)
    for index, prompt in enumerate(prompts()):
        want = alone.greedy(prompt, 12)
        assert played.tokens[f"here{index}"] == want
        assert played.tokens[f"there{index}"] == want[: len(played.tokens[f"there{index}"])]
    assert set(played.reasons().values()) == {"length", "abort"}
    until = time.monotonic() + 60
    while landing(second)._arriving and time.monotonic() < until:
        time.sleep(0.01)
    assert pool.used == len(taken) * pool.slab and landing(second)._rows == {}
    connector = second.scheduler.connector
    assert not getattr(connector, "remote", connector)._fetches


def test_who_has_another_key_gets_nothing(make_lively: Any, play: Any, started: Any, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_bytes(b"another key of 16 bytes")
    config, prompt, port = make_lively("Llama"), prompts()[0], free_port(4)
    first = started(config, port)
    second = started(config, free_port(4), port, key="wrong")
    hold(first, play, prompt)
    message = NewRequest(id="d", prompt=prompt, max_tokens=2, sampling=GREEDY, transfer=f"127.0.0.1:{port}/p")
    assert play(second, [message]).cached["d"] == 0
    with pytest.raises(TransferError, match="it has another key: give both the same"):
        connect(("127.0.0.1", port), b"x" * 16, time.monotonic() + 5)


@pytest.mark.parametrize("size", [1, 2])
def test_a_start_that_fails_after_the_ranks_are_ready_leaves_no_port_open(
    size: int, make_lively: Any, started: Any
) -> None:
    port, config = free_port(4), make_lively("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2})
    config = replace(config, executor="inline", infer=replace(config.infer, tp_size=size))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match="cannot be listened on"):
        started(config, port)  # the controller's port is taken, those of its ranks are not
    for rank in range(size):
        socket.create_server(("127.0.0.1", port + 1 + rank)).close()
    started(config, port).close()


def test_a_rank_whose_start_fails_has_opened_no_port(
    make_lively: Any, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("it fails late")

    port = free_port(4)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="it fails late"):
        patch.setattr("evener.engine.worker.worker.Worker._warm_up", fail)
        started(make_lively("Llama"), port)
    socket.create_server(("127.0.0.1", port + 1)).close()


def landing(engine: Controller) -> Any:
    mover = engine.executor.worker.mover  # type: ignore[attr-defined]
    return mover.remote if isinstance(mover, SharedMover) else mover


def test_wrong_questions_are_refused_and_the_engine_goes_on(make_lively: Any, play: Any, started: Any) -> None:
    port = free_port(4)
    engine = started(make_lively("Llama"), port)
    own = Address("127.0.0.1", port)
    engine_own = engine.scheduler.connector._fingerprint

    def refused(where: tuple[str, int], question: Any, why: str) -> None:
        with connect(where, KEY, time.monotonic() + 5) as channel, pytest.raises(TransferError, match=why):
            channel.ask(question, Done)

    refused((own.host, own.port), Lookup("another", "p", b""), "the servers differ")
    refused((own.host, own.port), Lookup(engine_own, "p", b"abc"), "3 bytes of digests")
    refused((own.host, own.port), Read([0], [1]), "that is for a rank")
    refused(own.of_rank(0), Release(1), "that is for a controller")
    for groups, blocks in (([0], [0]), ([0], [10**6]), ([0], [-1]), ([9], [1]), ([-1], [1]), ([0, 0], [1])):
        refused(own.of_rank(0), Read(groups, blocks), "there is no such|the lists have")
    refused(own.of_rank(0), Fetch("127.0.0.1", 22, 1.0, [1], [0], [1]), "is not in offload.kv_peers")
    with connect((own.host, own.port), KEY, time.monotonic() + 5) as channel:
        assert channel.ask(Lookup(engine_own, "p", b"a" * 32), Found).blocks == [[0]]
        assert not channel.ask(Release(7), Released).valid
    with connect(own.of_rank(0), KEY, time.monotonic() + 5) as channel:
        channel.ask(Drop([1, 2, 3]), Done)
    with socket.create_connection((own.host, own.port)) as rude:
        rude.sendall(b"\xff" * 4096)
    assert len(play(engine, [NewRequest(id="a", prompt=[4, 5], max_tokens=3, sampling=GREEDY)]).tokens["a"]) == 3


def test_more_blocks_than_the_operator_has_room_for_are_computed(
    make_lively: Any, play: Any, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config, prompt = make_lively("Llama"), prompts()[2]
    first, second, address = pair(config, kv_landing_bytes=1000)
    hold(first, play, prompt)
    message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")
    assert play(second, [message]).tokens["d"] == NaiveModel(config.model, max_positions=128).greedy(prompt, 9)
    eventually(lambda: "more bytes do not fit offload.kv_landing_bytes=1000" in caplog.text)
    assert landing(second)._arriving == 0


def test_each_rank_sends_and_gets_its_part(make_lively: Any, play: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    ports = free_port(4), free_port(4)
    base, said = make_lively("Llama", **{"infer.tp_size": 2}), []
    for own, peer in (ports, ports[::-1]):
        offload = {"kv_transfer": f"127.0.0.1:{own}", "kv_peers": f"127.0.0.1:{peer}",
                   "kv_key_file": str(tmp_path / "key")}  # fmt: skip
        said.append(replace(base, options={**base.options, "offload": offload}))
    prompt = prompts()[2]
    with rank_threads(said[0]) as (first, _), rank_threads(said[1]) as (second, ranks):
        hold(first, play, prompt)
        message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"127.0.0.1:{ports[0]}/p")
        played = play(second, [message])
        assert played.tokens["d"] == NaiveModel(base.model, max_positions=128).greedy(prompt, 9)
        assert played.cached["d"] == 48
        received = [worker.mover.counters()["kv_transfer_received_bytes"] for worker in ranks.workers]
        assert len(received) == 2 and received[0] == received[1] > 0
        for engine in (first, second):
            engine.close()


def test_a_block_that_is_not_written_shows_in_the_tokens(
    make_lively: Any, play: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault."""
    right = ExportedBlocks.write
    monkeypatch.setattr(ExportedBlocks, "write", lambda self, blocks, rows: right(self, blocks[1:], rows[1:]))
    config, prompt = make_lively("Llama"), prompts()[2]
    first, second, address = pair(config)
    hold(first, play, prompt)
    message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")
    assert play(second, [message]).tokens["d"] != NaiveModel(config.model, max_positions=128).greedy(prompt, 9)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_transfer": "0.0.0.0:21100"}, "under which the other servers reach this one"),
        ({"kv_transfer": "here"}, "under which the other servers reach this one"),
        ({"kv_peers": "a"}, "give HOST:PORT"),
        ({"kv_key_file": None}, "needs a key that all its servers share"),
        ({"kv_key_file": "/nowhere/key"}, "cannot be read"),
        ({"kv_hold_seconds": 0.0}, "must be more than 0"),
    ],
)
def test_wrong_settings_are_said_at_the_start(wrong: Any, says: str, make_lively: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    config = make_lively("Llama")
    offload = {"kv_transfer": f"127.0.0.1:{free_port(4)}", "kv_key_file": str(tmp_path / "key"), **wrong}
    with pytest.raises(ConfigError, match=says):
        build_controller(replace(config, options={**config.options, "offload": offload}))


def test_a_short_key_a_used_port_and_two_connectors_are_refused(make_lively: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    config, port = make_lively("Llama"), free_port(4)
    offload = {"kv_transfer": f"127.0.0.1:{port}", "kv_key_file": str(tmp_path / "key")}
    shares = replace(config, options={**config.options, "offload": offload})
    with pytest.raises(ConfigError, match="must have 16 to 4096 bytes"):
        build_controller(shares)
    (tmp_path / "key").write_bytes(KEY)
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(ConfigError, match="cannot be listened on"):
        build_controller(shares)
    for more in ({}, {"kv_host_memory": 1 << 22}):
        with pytest.raises(ConfigError, match=r"offload\.kv_transfer.*=true too, and nothing else"):
            build_controller(replace(shares, infer=replace(shares.infer, prefix_cache=False, **more)))


def test_blocks_in_host_memory_are_not_fetched_and_fetched_blocks_stay_there(
    make_lively: Any, play: Any, pair: Any
) -> None:
    config = make_lively("Llama", **{"infer.kv_host_memory": 1 << 22})
    alone = NaiveModel(config.model, max_positions=128)
    first, second, address = pair(config)
    prompt, rank = prompts()[2], landing(second)

    def ask(tokens: list[int], transfer: str, hits: int) -> int:
        """Returns how many bytes come from the other server."""
        before = rank.counters()["kv_transfer_received_bytes"]
        message = NewRequest(id="d", prompt=tokens, max_tokens=9, sampling=GREEDY, transfer=transfer)
        played = play(second, [message])
        assert played.tokens["d"] == alone.greedy(tokens, 9) and played.cached["d"] == (len(tokens) - 1) // 16 * 16
        assert counters(second)["kv_host_hits"] == hits and counters(second)["kv_transfer_failures"] == 0
        return int(rank.counters()["kv_transfer_received_bytes"] - before)

    def forget(controller: Controller) -> None:
        """Let all blocks leave the device."""
        pool = controller.scheduler.state.pool
        controller.scheduler.connector.remote._held.expire()
        pool.release(take(pool, pool.free // pool.slab))

    def held(tokens: list[int], name: str) -> str:
        hold(first, play, tokens, name)
        return f"{address}/{name}"

    two = ask(prompt[:33], held(prompt[:33], "p0"), hits=0)
    assert two > 0
    forget(second)
    assert ask(prompt[:33], "", hits=1) == 0, "host memory has what came from the other server"
    forget(second)
    # Of three blocks, host memory has two.
    assert ask(prompt[:49], held(prompt[:49], "p1"), hits=2) == two // 2
    forget(first)  # the prompts left the first one's device too, and its host memory has them
    assert ask([*prompt[:49], 5, 7, 9], held([*prompt[:49], 5, 7, 9], "p2"), hits=2) == 0
    assert counters(first)["kv_host_hits"] == 1 and counters(second)["kv_transfer_hits"] == 2
    first.scheduler.connector.give_back()  # nobody has asked for the last prompt
    assert first.scheduler.state.pool.used == second.scheduler.state.pool.used == 0


def test_a_block_that_is_taken_before_its_contents_come_is_neither_kept_nor_written(
    make_lively: Any, play: Any, pair: Any
) -> None:
    first, second, address = pair(make_lively("Llama", **{"infer.kv_host_memory": 1 << 22}))
    hold(first, play, prompts()[2])
    second.handle([NewRequest(id="d", prompt=prompts()[2], max_tokens=9, sampling=GREEDY, transfer=f"{address}/p")])
    connector, pool = second.scheduler.connector, second.scheduler.state.pool
    request, until = second.scheduler.waiting[0], time.monotonic() + 60
    while not connector.ready(request, True):
        assert time.monotonic() < until
    assert len(connector.remote.unwritten) == 3
    assert connector.give_back()
    taken = take(pool, pool.free)
    assert taken and not connector.host.places._by_key
    assert connector.moves() is None
    pool.release(taken)
    while landing(second)._rows:
        assert time.monotonic() < until
    second.handle([Abort("d")])
