"""Heartbeats: each child sends one every second, so that its parent notices when it hangs or is cut off.

A process that is stopped, swapped out or cut off from the network keeps its process id and its sockets; only the
missing heartbeats show it. A thread of its own sends them, so that a long step does not delay them. The parent answers
each heartbeat, and a child that gets no answers ends: a parent that is stopped, or on a machine that has failed, closes
no pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

import zmq

from evener.distributed.contact import Keys, set_curve_keys

log = logging.getLogger("evener.engine")
#: Exit codes of a child that has lost its parent: the pipe or the heartbeats ended, or a connection broke.
EXIT_PARENT_LOST, EXIT_DISCONNECTED = 3, 4
#: Seconds between heartbeats. A thread that did not run for ``_SUSPENDED_GAP`` seconds was itself suspended and may
#: have missed heartbeats of others, so that time does not count.
_INTERVAL, _SUSPENDED_GAP = 1.0, 3.0
#: Seconds before the first heartbeat that do not count: the child starts a Python interpreter first.
_STARTUP_GRACE = 20.0


class HeartbeatMonitor:
    """The parent's side: answers the heartbeats that come to ``socket``, a bound ROUTER, and notes when each came. It
    owns the socket from now on, and closes it when the socket's context is terminated.

    zmq itself sends the answers, in a thread that runs no Python: whatever this process computes, even with the GIL
    held, no child takes it for lost.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._stop, self._last_seen, self._polled = threading.Event(), dict[str, float](), time.monotonic()
        copies, self._copies = (socket.context.socket(zmq.PAIR) for _ in range(2))
        for end in (copies, self._copies):
            end.setsockopt(zmq.SNDHWM, 0)
            end.setsockopt(zmq.RCVHWM, 0)
            end.setsockopt(zmq.LINGER, 0)
        copies.bind(f"inproc://heartbeats-{id(self)}")
        self._copies.connect(f"inproc://heartbeats-{id(self)}")
        socket.setsockopt(zmq.ROUTER_MANDATORY, 0)  # a child that has died gets no answer
        threading.Thread(target=_answer, args=(socket, copies), name="evener-heartbeat-answers", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="evener-heartbeats", daemon=True)
        self._thread.start()

    def register(self, name: str) -> None:
        """Expect heartbeats of a child that was started under this name."""
        self._last_seen[name] = time.monotonic() + _STARTUP_GRACE

    def seconds_since_last(self, name: str) -> float:
        """Seconds since the child's last heartbeat, up to the last time that this process looked for one; 0 for a name
        that is not registered."""
        return max(0.0, self._polled - self._last_seen.get(name, self._polled))

    def close(self) -> None:
        """Stop noting heartbeats. Calling it again does nothing."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            received = self._copies.poll(100)
            now = time.monotonic()
            if now - self._polled > _SUSPENDED_GAP:
                for name in list(self._last_seen):
                    self._last_seen[name] += now - self._polled
            self._polled = now
            if received:
                self._last_seen[self._copies.recv_multipart()[0].decode(errors="replace")] = now
        self._copies.close()


def _answer(socket: zmq.Socket[bytes], copies: zmq.Socket[bytes]) -> None:
    """Send every message back, and a copy of it to ``copies``, until the context is terminated."""
    with contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(socket, socket, copies)
    socket.close(linger=0)
    copies.close()


def start_heartbeat(address: str, name: str, keys: Keys | None = None, timeout: float = 0) -> None:
    """Send heartbeats to the parent whose monitor listens at ``address``, from a thread of their own. After ``timeout``
    seconds without an answer (0: never) this process ends with ``EXIT_PARENT_LOST``."""
    arguments = (address, name, keys, timeout)
    threading.Thread(target=_run_heartbeat, args=arguments, name="evener-heartbeat", daemon=True).start()


def _run_heartbeat(address: str, name: str, keys: Keys | None, timeout: float) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.LINGER, 0)
    set_curve_keys(socket, keys)
    socket.connect(address)
    heard = last = time.monotonic()
    while True:
        with contextlib.suppress(zmq.Again):  # the connection is closed: the timeout decides
            socket.send(b"", zmq.NOBLOCK)
        if socket.poll(int(_INTERVAL * 1000)):
            while socket.poll(0):
                socket.recv()
            heard = time.monotonic()
            time.sleep(_INTERVAL)
        now = time.monotonic()
        if now - last > _SUSPENDED_GAP:
            heard += now - last
        last = now
        if timeout and now - heard > timeout:
            why = "its parent is stopped or cut off; restart the server"
            log.error("%s got no answer to its heartbeats for %.0f s and ends: %s", name, now - heard, why)
            os._exit(EXIT_PARENT_LOST)
