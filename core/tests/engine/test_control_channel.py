"""The control channel: messages by rank, heartbeats, and clients without keys, which are rejected."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from evener.distributed.contact import Keys, set_curve_keys
from evener.engine.processes import control_channel, heartbeat
from evener.engine.processes.child_process import ParentChannel
from evener.engine.processes.control_channel import ControlClient, ControlServer, terminate_context
from evener.engine.wire.messages import Abort, LoadAdapter
from evener.errors import EngineDeadError

#: Seconds for whatever must happen some time; a machine with other work is slow.
PATIENCE = 120.0


@pytest.fixture(params=[None, "127.0.0.1"])
def hub(request: pytest.FixtureRequest) -> Iterator[ControlServer]:
    made = ControlServer(request.param)
    yield made
    made.close()
    made.close()


def test_messages_are_addressed_to_and_tagged_with_a_rank(hub: ControlServer) -> None:
    links = [ControlClient(hub.addresses, rank, hub.keys) for rank in (0, 3)]
    for rank, link in zip((0, 3), links, strict=True):
        link.send(b"from %d" % rank)
    assert sorted(filter(None, (hub.receive(PATIENCE) for _ in links))) == [(0, b"from 0"), (3, b"from 3")]
    hub.send(3, b"to 3")
    assert links[1].receive(PATIENCE) == b"to 3" and links[0].receive(0) is None
    with pytest.raises(EngineDeadError, match="its control connection is closed"):
        hub.send(1, b"nobody is there")
    for link in links:
        link.close()


def test_heartbeats_are_received_and_missing_ones_are_timed(
    hub: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        heartbeat, "_STARTUP_GRACE", 2 * PATIENCE
    )  # however long the first beat takes, nobody is silent before it
    assert hub.heartbeats.seconds_since_last("0") == 0
    hub.heartbeats.register("1")
    link = ControlClient(hub.addresses, 0, hub.keys)
    until = time.monotonic() + PATIENCE
    while not (silence := hub.heartbeats.seconds_since_last("0")) and time.monotonic() < until:
        time.sleep(0.01)
    assert silence > 0 and hub.heartbeats.seconds_since_last("1") == 0
    link.close()


_CHILD = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
sys.stdin.readline()
socket.send(b"")
sys.stdout.write("answered" if socket.poll(20_000) else "no answer")
sys.stdout.flush()
socket.close(linger=0)
"""


def test_heartbeats_are_answered_while_another_call_holds_the_gil() -> None:
    hub = ControlServer()
    command = [sys.executable, "-c", _CHILD, hub.addresses[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        said = ctypes.create_string_buffer(20)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        # ``PyDLL`` keeps the GIL, here until the child has its answer: no Python runs in this process meanwhile.
        ctypes.PyDLL(None).read(child.stdout.fileno(), said, 20)
    hub.close()
    assert said.value == b"answered"


def test_only_the_time_in_which_heartbeats_were_looked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = ControlServer()
    hub.heartbeats.register("0")
    hub.heartbeats.close()
    later = time.monotonic() + 1000
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: later)
    silence = hub.heartbeats.seconds_since_last("0")
    monkeypatch.undo()
    hub.close()
    assert silence == 0


@pytest.mark.parametrize("shown", ["nothing", "another pair", "another controller"])
def test_a_client_with_unknown_keys_is_rejected(shown: str) -> None:
    hub = ControlServer("127.0.0.1")
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
        set_curve_keys(socket, keys)
        socket.connect(hub.addresses[0])
        socket.send(b"let me in")
        link = ControlClient(hub.addresses, 1, hub.keys)
        link.send(b"one of us")
        assert hub.receive(PATIENCE) == (1, b"one of us") and hub.receive(0.3) is None
        link.close()
    hub.close()


def test_close_returns_when_zmq_threads_hang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(control_channel, "_TERMINATE_TIMEOUT", 0.05)
    before = set(threading.enumerate())
    context = zmq.Context()
    held = context.socket(zmq.PULL)
    terminate_context(context)
    assert "zmq did not close its sockets" in caplog.text
    held.close()
    (ending,) = (each for each in set(threading.enumerate()) - before if each.name == "evener-end")
    ending.join()


def test_close_starts_no_thread_at_interpreter_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    hub = ControlServer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        hub.close()
    assert not Path(hub.folder.path).exists()
    hub._context.term()


#: A worker of another machine: told where its controller is, waits for messages.
WORKER = """
import sys
from evener.engine.processes.control_channel import ControlClient
link = ControlClient(sys.argv[1:3], 0, timeout=float(sys.argv[3]))
link.send(b"here")
link.receive(None)
"""


@pytest.mark.parametrize(("address", "timeout", "code"), [("ranks", "0", 4), ("beats", "1", 3)])
def test_a_worker_exits_when_its_controller_does_not_answer(address: str, timeout: str, code: int) -> None:
    hub = ControlServer()
    command = [sys.executable, "-c", WORKER, *hub.addresses, timeout]
    if address == "beats":
        command[4] += ".nobody"
    with subprocess.Popen(command) as worker:
        if address == "ranks":
            assert hub.receive(PATIENCE) == (0, b"here")
            hub.close()
        # Else its second may be over before it has said anything; that ends it with a code of its own.
        assert worker.wait(PATIENCE) == code
    hub.close()


def test_the_controller_takes_one_piece_of_an_adapter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step comes between two of them, however fast they arrive."""
    waiting = [Abort("a"), LoadAdapter("x", [], last=False), LoadAdapter("x", []), Abort("b"), Abort("c")]
    encoded = [msgspec.msgpack.encode(message) for message in waiting]
    socket = SimpleNamespace(poll=lambda _: bool(encoded), recv=lambda: encoded.pop(0))
    parent = ParentChannel.__new__(ParentChannel)
    monkeypatch.setattr(parent, "_in", socket, raising=False)
    taken = [parent.take(0) for _ in range(4)]
    assert taken == [waiting[:2], waiting[2:3], waiting[3:], []]
