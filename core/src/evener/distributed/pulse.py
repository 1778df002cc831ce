"""Signs of life: every child beats once a second, and its parent knows who has gone quiet.

A process that was stopped, swapped out for ever or cut off keeps its process id and its sockets; only its silence
tells. Beats come from a thread of their own, so that a long step is no silence. A parent that is stopped, or a machine
that is gone, closes no pipe: a child listens for the answers to its beats, too, and ends when there are none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

import zmq

from evener.distributed.keys import Keys, show_keys

log = logging.getLogger("evener.engine")
#: Seconds between beats, and the gap in a thread's own time after which it was itself stopped and nobody is to blame.
_EVERY, _ASLEEP = 1.0, 3.0
#: Seconds that a child may take to its first beat, beyond the limit of silence: it starts an interpreter.
_GRACE = 20.0


class Pulse:
    """The parent's side: a thread that takes beats from ``socket`` (a bound ROUTER, which is its own from now on) and
    answers them."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._stop = socket, threading.Event()
        self._heard: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="evener-pulse", daemon=True)
        self._thread.start()

    def expect(self, name: str) -> None:
        """A child was started that will beat under this name."""
        self._heard[name] = time.monotonic() + _GRACE

    def silence(self, name: str) -> float:
        """Seconds since the last beat; 0 before the first of a child that is not expected."""
        return max(0.0, time.monotonic() - self._heard.get(name, time.monotonic()))

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            came = self._socket.poll(100)
            now = time.monotonic()
            if now - last > _ASLEEP:
                for name in list(self._heard):
                    self._heard[name] += now - last
            last = now
            if came:
                # Neither may block, or ``close`` would; a child that has gone meanwhile is told by its silence.
                with contextlib.suppress(zmq.ZMQError):
                    child, word = self._socket.recv_multipart(zmq.NOBLOCK)
                    self._heard[child.decode()] = now
                    self._socket.send_multipart([child, word], zmq.NOBLOCK)
        self._socket.close(linger=0)


def beat(address: str, name: str, keys: Keys | None = None, limit: float = 0) -> None:
    """Begin to beat for the parent whose pulse listens at ``address``. With a ``limit`` this process ends, with exit
    code 3, once it has heard no answer for so many seconds."""
    threading.Thread(target=_beat, args=(address, name, keys, limit), name="evener-beat", daemon=True).start()


def _beat(address: str, name: str, keys: Keys | None, limit: float) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.LINGER, 0)
    show_keys(socket, keys)
    socket.connect(address)
    heard = last = time.monotonic()
    while True:
        with contextlib.suppress(zmq.Again):  # nobody takes beats any more: the limit decides
            socket.send(b"", zmq.NOBLOCK)
        if socket.poll(int(_EVERY * 1000)):
            while socket.poll(0):
                socket.recv()
            heard = time.monotonic()
            time.sleep(_EVERY)
        now = time.monotonic()
        if now - last > _ASLEEP:
            heard += now - last
        last = now
        if limit and now - heard > limit:
            log.error("signs of life of %s were not answered for %.0f s: its process ends", name, now - heard)
            os._exit(3)
