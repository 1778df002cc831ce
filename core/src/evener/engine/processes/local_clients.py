"""Engine clients whose controller runs in this process: inline (steps run inside ``receive``), or in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from evener.engine.controller.controller import Controller
from evener.engine.wire.client import EngineClient
from evener.engine.wire.messages import FromController, Ready, Shutdown, ToController


class InlineClient(EngineClient):
    """Runs the controller in the caller's thread: ``receive`` runs steps until there is an event."""

    def __init__(self, controller: Controller, ready: Ready) -> None:
        self.controller = controller
        self._inbox: queue.SimpleQueue[ToController] = queue.SimpleQueue()
        self._events: deque[FromController] = deque([ready])
        self._closed = False

    def send(self, message: ToController) -> None:
        if not self._closed:
            self._inbox.put(message)

    def receive(self, timeout: float | None) -> list[FromController]:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._take()
        while not self._events and not self._is_idle():
            self._events.extend(self._step())
            self._take()
            if deadline is not None and time.monotonic() >= deadline:
                break
        events, self._events = list(self._events), deque()
        return events

    def close(self, drain: bool = False) -> None:
        if self._closed:
            return
        self._inbox.put(Shutdown(drain=drain))
        self._take()
        while not self._is_idle():
            self._events.extend(self._step())
        self._closed = True
        self.controller.close()

    def _is_idle(self) -> bool:
        """Whether there is no step to run. The plans in flight of a dead engine are never read."""
        return self.controller.idle or self.controller.dead is not None or self._closed

    def _step(self) -> list[FromController]:
        try:
            return self.controller.step()
        except BaseException as error:  # the step stopped halfway, so the state is not consistent any more
            self._events.extend(self.controller.die(f"a step failed: {type(error).__name__}: {error}"))
            raise

    def _take(self) -> None:
        while not self._inbox.empty():
            self._events.extend(self.controller.handle([self._inbox.get()]))


class ThreadClient(EngineClient):
    """Runs the controller in a daemon thread; messages and events go through queues."""

    def __init__(self, controller: Controller, ready: Ready) -> None:
        self._controller = controller
        self._mailbox = _Queues()
        self._mailbox.put([ready])
        self._thread = threading.Thread(target=self._run, name="evener-controller", daemon=True)
        self._thread.start()

    def send(self, message: ToController) -> None:
        self._mailbox.inbox.put(message)

    def receive(self, timeout: float | None) -> list[FromController]:
        try:
            events = list(self._mailbox.outbox.get(timeout=timeout))
        except queue.Empty:
            return []
        while not self._mailbox.outbox.empty():
            events += self._mailbox.outbox.get()
        return events

    def close(self, drain: bool = False) -> None:
        self._mailbox.inbox.put(Shutdown(drain=drain))
        self._thread.join()
        self._controller.close()

    def _run(self) -> None:
        try:
            self._controller.run(self._mailbox)
        except BaseException as error:  # a bug: without an event, requests would wait for ever
            self._mailbox.put(self._controller.die(f"the engine's controller failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._mailbox.put([])  # wakes a blocked receive


class _Queues:
    """A mailbox made of two queues."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[ToController] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Sequence[FromController]] = queue.SimpleQueue()

    def take(self, timeout: float) -> list[ToController]:
        messages: list[ToController] = []
        try:
            messages.append(self.inbox.get(timeout=timeout) if timeout else self.inbox.get_nowait())
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages

    def put(self, events: Sequence[FromController]) -> None:
        self.outbox.put(events)
