"""The control channel: messages by rank, signs of life, and strangers who are turned away."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from torch.distributed import HashStore

from evener.distributed import hub as hub_module
from evener.distributed import pulse
from evener.distributed.hub import Hub, Link, end_context
from evener.distributed.keys import Keys, show_keys
from evener.distributed.launched import Contact, Launched
from evener.errors import ConfigError, EngineDeadError

#: Seconds for whatever must happen some time; a machine with other work is slow.
PATIENCE = 120.0


@pytest.fixture(params=[None, "127.0.0.1"])
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    made = Hub(request.param)
    yield made
    made.close()
    made.close()


def test_messages_go_to_a_rank_and_come_with_its_number(hub: Hub) -> None:
    links = [Link(hub.addresses, rank, hub.keys) for rank in (0, 3)]
    for rank, link in zip((0, 3), links, strict=True):
        link.send(b"from %d" % rank)
    assert sorted(filter(None, (hub.receive(PATIENCE) for _ in links))) == [(0, b"from 0"), (3, b"from 3")]
    hub.send(3, b"to 3")
    assert links[1].receive(PATIENCE) == b"to 3" and links[0].receive(0) is None
    with pytest.raises(EngineDeadError, match="its control connection is closed"):
        hub.send(1, b"nobody is there")
    for link in links:
        link.close()


def test_a_rank_beats_and_its_silence_is_counted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_GRACE", 2 * PATIENCE)  # however long the first beat takes, nobody is silent before it
    assert hub.pulse.silence("0") == 0
    hub.pulse.expect("1")
    link = Link(hub.addresses, 0, hub.keys)
    until = time.monotonic() + PATIENCE
    while not (silence := hub.pulse.silence("0")) and time.monotonic() < until:
        time.sleep(0.01)
    assert silence > 0 and hub.pulse.silence("1") == 0
    link.close()


@pytest.mark.parametrize("shown", ["nothing", "another pair", "another controller"])
def test_a_stranger_is_turned_away(shown: str) -> None:
    hub = Hub("127.0.0.1")
    assert hub.keys is not None
    public, secret = zmq.curve_keypair()
    keys = {
        "nothing": None,
        "another pair": Keys(hub.keys.controller, public, secret),
        "another controller": Keys(public, hub.keys.public, hub.keys.secret),
    }[shown]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"0")
        show_keys(socket, keys)
        socket.connect(hub.addresses[0])
        socket.send(b"let me in")
        link = Link(hub.addresses, 1, hub.keys)
        link.send(b"one of us")
        assert hub.receive(PATIENCE) == (1, b"one of us") and hub.receive(0.3) is None
        link.close()
    hub.close()


def test_a_channel_whose_threads_do_not_let_go_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_PATIENCE", 0.05)
    before = set(threading.enumerate())
    context = zmq.Context()
    held = context.socket(zmq.PULL)
    end_context(context)
    assert "zmq did not let go of the control channel" in caplog.text
    held.close()
    (ending,) = (each for each in set(threading.enumerate()) - before if each.name == "evener-end")
    ending.join()


def test_a_channel_is_closed_while_the_interpreter_ends_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    hub = Hub()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        hub.close()
    assert not Path(hub.folder.path).exists()
    hub._context.term()


#: A worker of another machine: told where its controller is, waits for messages.
WORKER = """
import sys
from evener.distributed.hub import Link
link = Link(sys.argv[1:3], 0, limit=float(sys.argv[3]))
link.send(b"here")
link.receive(None)
"""


@pytest.mark.parametrize(("address", "limit", "code"), [("ranks", "0", 4), ("beats", "1", 3)])
def test_a_worker_that_hears_nothing_of_its_controller_ends(address: str, limit: str, code: int) -> None:
    hub = Hub()
    command = [sys.executable, "-c", WORKER, *hub.addresses, limit]
    if address == "beats":
        command[4] += ".nobody"
    with subprocess.Popen(command) as worker:
        if address == "ranks":
            assert hub.receive(PATIENCE) == (0, b"here")
            hub.close()
        # Else its second may be over before it has said anything; that ends it with a code of its own.
        assert worker.wait(PATIENCE) == code
    hub.close()


STARTED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "29500"}  # fmt: skip


def test_what_torchrun_says_is_read() -> None:
    launched = Launched.of(STARTED)
    assert launched == Launched(5, 8, 1, 4, "127.0.0.1") and launched.interface == "127.0.0.1"
    assert Launched(0, 2, 0, 2, "::1").interface == "[::1]"
    assert Launched.of({}) is None and Launched.of({**STARTED, "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=no.such.machine.invalid cannot be used"):
        _ = Launched(0, 2, 0, 2, "no.such.machine.invalid").interface


def test_half_of_what_torchrun_says_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"RANK=one is no number; start them with torchrun"):
        Launched.of({**STARTED, "RANK": "one"})
    del (rest := dict(STARTED))["MASTER_PORT"]
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 .* MASTER_PORT is not set"):
        Launched.of(rest)


def test_ranks_are_told_of_one_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(Launched, "_store", lambda _: store)
    launched = Launched(0, 2, 0, 2, "127.0.0.1")
    launched.publish(Contact(["here", "there"]))
    assert launched.find() == Contact(["here", "there"])
    with pytest.raises(ConfigError, match=r"work for one engine, and this process has had one: keep that, or run a"):
        launched.publish(Contact(["elsewhere"]))
