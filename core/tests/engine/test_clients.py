"""Inline and threaded engine clients: what happens when a step fails."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from evener.engine.controller.blocks import CacheListener
from evener.engine.processes.local_clients import InlineClient, ThreadClient
from evener.engine.processes.start import build_controller
from evener.engine.wire.executor import Executor
from evener.engine.wire.messages import Dead, Finished, NewRequest, Ready
from evener.engine.wire.plan import Plan, StepResult
from evener.engine.worker.inline_executor import InlineExecutor
from evener.errors import ConfigError, EngineDeadError, EngineError
from evener.plugins.catalog import Catalog

MESSAGES = [NewRequest(id=name, prompt=[1, 2, 3], max_tokens=9) for name in "ab"]


@pytest.fixture
def failing(make_config: Any) -> Any:
    """``failing(error)``: a controller whose third result raises it, and its Ready. One in a thread of its own takes no
    message before ``send_all`` has sent all: an engine that dies between two has only the first to end."""

    def make(error: BaseException) -> Any:
        controller, ready = build_controller(make_config())
        inner, left = controller.executor, [2]

        class Failing(type(inner)):  # type: ignore[misc]
            sent = threading.Event()

            def attach(self) -> None:
                self.sent.wait()
                super().attach()

            def read(self) -> StepResult:
                left[0] -= 1
                if left[0] < 0:
                    raise error
                return super().read()  # type: ignore[no-any-return]

        inner.__class__ = Failing
        return controller, ready

    return make


def send_all(client: Any, executor: Any) -> None:
    for message in MESSAGES:
        client.send(message)
    executor.sent.set()


def ends(events: list[Any]) -> list[tuple[str, str]]:
    return [(e.id, e.reason) for e in events if isinstance(e, Finished)]


def everything(client: Any) -> list[Any]:
    events: list[Any] = []
    while not any(isinstance(e, Dead) for e in events):
        new = client.receive(120)
        assert new
        events += new
    return events


@pytest.mark.parametrize("kind", [InlineClient, ThreadClient])
def test_a_dead_worker_ends_every_request_once_and_then_nothing_more_comes(failing: Any, kind: Any) -> None:
    controller, ready = failing(EngineDeadError("the worker is gone"))
    client = kind(controller, ready)
    send_all(client, controller.executor)
    events = everything(client)
    assert isinstance(events[0], Ready) and ends(events) == [("a", "error"), ("b", "error")]
    assert isinstance(events[-1], Dead) and events[-1].reason == "the worker is gone"
    assert client.receive(0) == []
    client.close()


class Ears(CacheListener):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def stored(self, key: Any, parent: bytes | None, tokens: Any, plain: bool) -> None:
        self.heard.append("stored")

    def close(self) -> None:
        self.heard.append("close")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [None, EngineDeadError("gone"), ZeroDivisionError("ours")])
@pytest.mark.parametrize("kind", [InlineClient, ThreadClient])
def test_all_who_listen_to_the_prefix_cache_hear_and_are_closed_once_with_the_client(
    make_config: Any, failing: Any, kind: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, answers = [Ears(), Ears()], Catalog.answers
    monkeypatch.setattr(
        Catalog, "answers",
        lambda self, name, *asked: iter(both) if name == "cache listener" else answers(self, name, *asked),
    )  # fmt: skip
    controller, ready = failing(error) if error else build_controller(make_config(**{"infer.block_size": 16}))
    client = kind(controller, ready)
    if error is None:
        client.send(NewRequest(id="a", prompt=[5] * 16, max_tokens=1))
        while not any(isinstance(event, Finished) for event in client.receive(120)):
            pass
    else:
        send_all(client, controller.executor)
        with contextlib.suppress(ZeroDivisionError):
            everything(client)
    client.close()
    client.close()
    assert [ears.heard for ears in both] == [["close"] if error else ["stored", "close"]] * 2


def test_workers_end_if_what_listens_to_the_prefix_cache_cannot_start(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Executor] = []
    monkeypatch.setattr(InlineExecutor, "close", lambda self: closed.append(self))
    with pytest.raises(ConfigError, match=r"server\.kv_events=nonsense cannot be used"):
        build_controller(make_config(**{"server.kv_events": "nonsense"}))
    assert len(closed) == 1


def test_a_defect_inside_an_inline_step_reaches_the_caller_and_leaves_no_request_open(failing: Any) -> None:
    controller, ready = failing(ZeroDivisionError("ours"))
    client = InlineClient(controller, ready)
    send_all(client, controller.executor)
    with pytest.raises(ZeroDivisionError, match="ours"):
        while True:
            client.receive(None)
    events = everything(client)
    assert ends(events) == [("a", "error"), ("b", "error")]
    assert "ZeroDivisionError: ours" in events[-1].reason
    assert client.receive(None) == [], "a dead engine does not wait for ever"
    client.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_threaded_step_fails_every_request_with_its_message(failing: Any) -> None:
    controller, ready = failing(ZeroDivisionError("ours"))
    client = ThreadClient(controller, ready)
    send_all(client, controller.executor)
    events = everything(client)
    assert ends(events) == [("a", "error"), ("b", "error")] and "ZeroDivisionError: ours" in events[-1].reason
    client.close()


def test_a_host_read_during_a_step_fails_its_requests_with_the_reason(make_config: Any) -> None:
    from evener_conformance.reference.executor import StrictExecutor, strict_controller

    controller, executor = strict_controller(make_config(**{"reference.delay": True}))
    runner = executor.worker.runner
    inner = runner.sampler.ids
    runner.sampler.ids = lambda logits, *rest, **more: inner(  # type: ignore[method-assign]
        logits + logits.max().item() * 0, *rest, **more
    )
    controller.handle(MESSAGES)
    events = controller.step()
    assert ends(events) == [("a", "error"), ("b", "error")] and isinstance(events[-1], Dead)
    assert "reads a value on the host during a step" in events[-1].reason
    assert isinstance(executor, StrictExecutor) and controller.step() == []


def test_a_dead_worker_is_detected_while_the_engine_is_idle(make_config: Any) -> None:
    controller, _ = build_controller(make_config())

    class Gone(type(controller.executor)):  # type: ignore[misc]
        def check(self) -> None:
            raise EngineError("gone")

        def submit(self, plan: Plan) -> None:
            pytest.fail("a dead engine submits nothing")

    controller.executor.__class__ = Gone
    assert controller.check() == [Dead("gone")] and controller.check() == []
    events = controller.handle(MESSAGES)
    assert ends(events) == [("a", "error"), ("b", "error")] and controller.step() == []
