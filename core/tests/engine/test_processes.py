"""Worker and controller in child processes: the same tokens as inline, and every death of a process is reported."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from evener.config import to_flat
from evener.distributed.world import RankPlacement, World
from evener.engine.processes import child, child_process
from evener.engine.processes.child_process import ChildFailure
from evener.engine.processes.control_channel import SHUTDOWN
from evener.engine.processes.local_clients import InlineClient
from evener.engine.processes.process_executor import ProcessExecutor
from evener.engine.processes.start import build_controller, start_engine
from evener.engine.wire.messages import Dead, NewRequest, Ready, Sampling
from evener.errors import ArchitectureError, ConfigError, EngineDeadError, EngineError, MemoryPlanError, NoBackendError
from evener_conformance.fake_engine import FakeEngine

#: Seconds for whatever must happen some time; a machine with other work is slow.
PATIENCE = 120.0
#: Tokens that take longer than any test: who asks for so many is open until something else ends him, however late this
#: process comes to it. The limits that have room for them.
ENDLESS = 90_000
ROOMY = {"infer.max_seq_len": 100_000, "infer.kv_memory": 2**28}


def requests(prefix: str = "r", max_tokens: int = 12) -> list[NewRequest]:
    warm = Sampling(temperature=0.9, top_k=30, seed=4, logprobs=1)
    return [
        NewRequest(id=f"{prefix}{i}", prompt=list(range(1 + i, 20 + 9 * i)), max_tokens=max_tokens, sampling=s)
        for i, s in enumerate((Sampling(temperature=0.0), warm, warm))
    ]


def same(played: Any, expected: Any) -> None:
    """Equal tokens; log-probabilities but for the last bits, as requests that arrive one by one have other company."""
    assert played.tokens == expected.tokens
    for name, rows in played.logprobs.items():
        assert [row.ids for row in rows] == [row.ids for row in expected.logprobs[name]]
        ours, theirs = ([v for row in r for v in row.values] for r in (rows, expected.logprobs[name]))
        assert ours == pytest.approx(theirs, abs=1e-4)


class Watched:
    """A process of somebody else, by a handle that does not mistake a reused id for it."""

    def __init__(self, pid: int) -> None:
        self.handle = os.pidfd_open(pid)

    def wait(self) -> bool:
        """True once it has ended; False when it has not in time."""
        ready, _, _ = select.select([self.handle], [], [], PATIENCE)
        os.close(self.handle)
        return bool(ready)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended_with(played: Any, names: list[str], *words: str) -> None:
    assert played.reasons() == dict.fromkeys(names, "error")
    for ends in played.ends.values():
        assert all(word in ends[0].error for word in words)


def roomy(make_config: Any) -> Any:
    """A configuration whose requests may be ``ENDLESS``; it gives the tokens of ``make_config()``."""
    return make_config("Llama", {"max_position_embeddings": 100_000}, **ROOMY)


@pytest.fixture
def expected(make_config: Any, drive: Any) -> Any:
    """Tokens and log-probabilities of the engine in this thread."""
    client = start_engine(make_config(), "inline")
    played = drive(client, requests())
    client.close()
    return played


def test_a_thread_gives_the_tokens_of_the_inline_engine(make_config: Any, drive: Any, expected: Any) -> None:
    client = start_engine(make_config(), "thread")
    try:
        played = drive(client, requests())
        same(played, expected)
    finally:
        client.close()
    assert client.receive(0) == []


@pytest.mark.slow
def test_a_worker_process_gives_the_same_tokens_and_its_death_ends_requests_with_the_reason(
    make_config: Any, drive: Any, expected: Any
) -> None:
    controller, ready = build_controller(make_config(executor="process"))
    executor = controller.executor
    assert isinstance(executor, ProcessExecutor)
    client = InlineClient(controller, ready)
    try:
        played = drive(client, requests())
        same(played, expected)
        for message in requests("later", 60):
            client.send(message)
        after = type(played)()
        while not after.tokens:
            after.see(client.receive(PATIENCE))
        os.kill(executor.children[0].process.pid, signal.SIGKILL)
        while not after.dead:
            after.see(client.receive(PATIENCE))
        ended_with(after, ["later0", "later1", "later2"], "worker", "SIGKILL")
        client.send(requests("too_late")[0])
        assert not any(isinstance(e, Dead) for e in client.receive(0)), "it says once that it is dead"
    finally:
        client.close()


def test_a_process_engine_gives_the_same_tokens_and_reports_a_killed_worker(
    make_config: Any, drive: Any, expected: Any
) -> None:
    client: Any = start_engine(roomy(make_config), "process")
    try:
        (first,) = client.receive(PATIENCE)
        assert isinstance(first, Ready) and first.info.backend == "reference"
        played = drive(client, requests())
        same(played, expected)
        for message in requests("later", ENDLESS):
            client.send(message)
        (worker,) = children(client._child.process.pid)
        after = type(played)()
        while len(after.tokens) < 3:  # all have arrived: what comes after Dead is answered after it
            after.see(client.receive(PATIENCE))
        os.kill(worker, signal.SIGKILL)
        while not after.dead:
            events = client.receive(PATIENCE)
            assert events and not after.dead
            after.see(events)
        ended_with(after, ["later0", "later1", "later2"], "worker", "SIGKILL")
        assert isinstance(events[-1], Dead), "Dead comes last"
    finally:
        client.close()


def test_a_killed_controller_is_reported_and_its_worker_exits(make_config: Any) -> None:
    client: Any = start_engine(make_config(), "process")
    try:
        assert isinstance(client.receive(PATIENCE)[0], Ready)
        controller = client._child.process.pid
        (worker,) = (Watched(pid) for pid in children(controller))
        os.kill(controller, signal.SIGKILL)
        (event,) = client.receive(PATIENCE)
        assert isinstance(event, Dead) and "controller" in event.reason and "SIGKILL" in event.reason
        assert client.receive(0) == []
        client.send(requests()[0])  # dropped: nobody would answer
        assert worker.wait(), "the worker outlived its controller"
    finally:
        client.close()


def test_messages_to_a_dead_controller_are_dropped_while_events_are_unread(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = SimpleNamespace(
        process=None, exit_description=lambda: "the controller process was killed", end=lambda _: None
    )
    monkeypatch.setattr(child_process, "ChildProcess", lambda *_: gone)
    client: Any = start_engine(make_config(), "process")
    with pytest.raises(EngineDeadError, match="the controller process is not connected"):
        client.send(requests()[0])
    address = f"ipc://{client._child._folder.path}/controller"
    with zmq.Context() as context, context.socket(zmq.PUSH) as up, context.socket(zmq.PULL) as down:
        down.connect(f"{address}.down")
        up.connect(f"{address}.up")
        info = FakeEngine().info
        up.send(msgspec.msgpack.encode([Ready(info=info)]))
        # Where the process is gone, ``receive`` waits for nothing that is still on its way.
        assert client._child._in.poll(PATIENCE * 1000)
        assert client.receive(PATIENCE) == [Ready(info=info)]
        up.send(msgspec.msgpack.encode([Dead("its worker was killed")]))
        assert client._child._in.poll(PATIENCE * 1000)
    while client._child._out.poll(1, zmq.POLLOUT):
        pass  # its end of the connection closes soon
    client.send(requests()[0])
    assert client.receive(PATIENCE) == [Dead("its worker was killed")]
    (event,) = client.receive(PATIENCE)
    assert isinstance(event, Dead) and "the controller process was killed" in event.reason
    client.close()


@pytest.mark.parametrize("deed", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_no_process_outlives_a_parent_that_is_killed_or_stopped(deed: signal.Signals, make_config: Any) -> None:
    flat = to_flat(make_config(**{"infer.heartbeat_timeout": 6.0 if deed == signal.SIGSTOP else 60.0}))
    code = (
        "import json, sys\n"
        "from evener.config import from_overrides\n"
        "from evener.engine.processes.start import start_engine\n"
        "flat = json.loads(sys.stdin.readline())\n"
        "client = start_engine(from_overrides(flat.pop('model'), flat), 'process')\n"
        "client.receive(None)\n"
        "print(client._child.process.pid, flush=True)\n"
        "print(client.receive(None), flush=True)\n"
        "client.close()\n"
        "print('closed', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(json.dumps(flat).encode() + b"\n")
        parent.stdin.flush()
        controller = int(parent.stdout.readline())
        watched = [Watched(controller), *(Watched(pid) for pid in children(controller))]
        assert len(watched) == 2
        parent.send_signal(deed)
        assert all(process.wait() for process in watched)
        parent.send_signal(signal.SIGCONT)
        said = parent.stdout.readline().decode()
        stopped = deed == signal.SIGSTOP
        assert ("the controller process ended with exit code 3" in said) == stopped
        assert parent.stdout.read() == b"closed\n" * stopped and parent.wait(PATIENCE) == (0 if stopped else -deed)


def test_a_start_up_error_in_a_child_keeps_its_class_and_message(make_config: Any, warm_children: None) -> None:
    wrong = make_config("Llama", {"architectures": ["LamaForCausalLM"]})
    with pytest.raises(ArchitectureError) as here:
        start_engine(wrong, "inline")
    with pytest.raises(ArchitectureError) as in_worker:
        ProcessExecutor(wrong)
    client = start_engine(wrong, "process")
    with pytest.raises(ArchitectureError) as in_controller:
        client.receive(PATIENCE)
    client.close()
    assert str(here.value) == str(in_worker.value) == str(in_controller.value)
    assert "LamaForCausalLM" in str(here.value)


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("MemoryPlanError", MemoryPlanError),
        ("NoBackendError", NoBackendError),
        ("UnknownNameError", ConfigError),
        ("did_you_mean", EngineError),
        ("Nonsense", EngineError),
    ],
)
def test_a_child_error_is_raised_as_its_class_or_nearest_base(kind: str, cls: type[Exception]) -> None:
    error = ChildFailure(kind, "the words").error()
    assert type(error) is cls and str(error) == "the words"


def test_close_with_drain_finishes_open_requests_and_without_aborts_them(
    make_config: Any, drive: Any, expected: Any
) -> None:
    for drain, reason, messages in ((True, "length", requests()), (False, "abort", requests(max_tokens=ENDLESS))):
        client = start_engine(roomy(make_config), "thread")
        for message in messages:
            client.send(message)
        client.close(drain=drain)
        client.close()
        played = type(expected)()
        played.see(client.receive(0))
        assert set(played.reasons().values()) == {reason} and len(played.ends) == 3
        if drain:
            assert played.tokens == expected.tokens


@pytest.mark.parametrize("role", ["worker", "controller"])
def test_collections_in_a_child_do_not_look_at_the_objects_of_its_start(
    role: str, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []

    def count(*_: Any) -> bytes:
        frozen.append(gc.get_freeze_count())
        return SHUTDOWN

    end = SimpleNamespace(send=count, receive=count, put=count)
    started = SimpleNamespace(run=count, close=lambda: None, facts=None)
    gc.unfreeze()
    monkeypatch.setattr("evener.engine.worker.worker.Worker", lambda *_, **__: started)
    monkeypatch.setattr("evener.engine.processes.start.build_controller", lambda *_, **__: (started, None))
    try:
        if role == "worker":
            child.run_worker(make_config(), end, RankPlacement(World.of(0, 1, 1), 0, 1, ""))
        else:
            child.run_controller_process(make_config(), end)
    finally:
        gc.unfreeze()
    ready, running = frozen
    assert ready == 0 and running > 1000
