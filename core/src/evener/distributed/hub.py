"""The control channel of ranks: plans to every worker, results and failures back, over one socket at the controller.

On one machine it is a socket file in a folder that only this user can open; between machines it is TCP, encrypted and
closed to strangers (``keys``). It carries msgpack, made and read by msgspec, and never tensors: those have groups of
their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from evener.distributed.keys import Guard, Keys, show_keys
from evener.distributed.pulse import Pulse, beat
from evener.errors import EngineDeadError
from evener.run_folder import RunFolder

log = logging.getLogger("evener.engine")
#: The message that ends a worker of another parent; one of our own ends with its pipe.
END = b""
#: Seconds that a process which closes its channel waits for zmq's threads.
_PATIENCE = 10.0


class Hub:
    """The controller's end. Used by one thread at a time.

    Args:
        host: the address of this machine's interface to the others; None keeps the channel on this machine.

    Attributes:
        folder: for this run's own files.
        addresses: what a ``Link`` connects to, for messages and for beats.
        keys: what it shows there; None on one machine.
        pulse: who beats, by rank as text.
    """

    def __init__(self, host: str | None = None) -> None:
        self._context = zmq.Context()
        self.folder = RunFolder()
        self._guard = None if host is None else Guard(self._context)
        self.keys = None if self._guard is None else self._guard.keys
        places = (self.folder.socket(name) if host is None else f"tcp://{host}:*" for name in ("ranks", "beats"))
        self._socket, beats = map(self._bind, places)
        self.addresses = [str(socket.getsockopt_string(zmq.LAST_ENDPOINT)) for socket in (self._socket, beats)]
        self.pulse = Pulse(beats)

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._guard is not None:
            self._guard.protect(socket)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.bind(address)
        return socket

    def send(self, rank: int, data: bytes) -> None:
        """Send one message to a rank that has sent one before.

        Raises:
            EngineDeadError: its connection is closed.
        """
        try:
            self._socket.send_multipart([str(rank).encode(), data], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            raise EngineDeadError(f"its control connection is closed ({error.strerror})") from error

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """The next message and the rank that sent it; None when ``timeout`` seconds pass first."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        rank, data = self._socket.recv_multipart()
        return int(rank), data

    def waiting(self, patience: float) -> bool:
        """Whether there is a message for ``receive``, or will be within ``patience`` seconds."""
        return bool(self._socket.poll(int(patience * 1000)))

    def close(self) -> None:
        """Let go of everything. Calling it again does nothing."""
        if not self._socket.closed:
            self.pulse.close()
            self._socket.close()
            if self._guard is not None:
                self._guard.close()
            end_context(self._context)
            self.folder.close()


def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Call when its sockets are closed: waits for zmq's threads to let go of them, but not for ever, as zmq itself
    does. A process that has said why it ends must end, whatever became of them while it was stopped or cut off."""
    ending = threading.Thread(target=context.term, name="evener-end", daemon=True)
    try:
        ending.start()
    except RuntimeError:
        return  # the interpreter ends, takes no more threads, and takes zmq's along
    ending.join(_PATIENCE)
    if ending.is_alive():
        log.warning("zmq did not let go of the control channel in %.0f s: this process ends without", _PATIENCE)


def end_with_connection(socket: zmq.Socket[bytes], closing: threading.Event) -> None:
    """Call before ``socket`` connects: its connection is not made again when it breaks, because messages may be lost
    with it. Unless that is ``closing`` it, the process ends with exit code 4."""
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)

    def watch() -> None:
        with contextlib.suppress(zmq.ContextTerminated):  # closed from this side
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED and not closing.is_set():
                os._exit(4)
        monitor.close(linger=0)

    threading.Thread(target=watch, name="evener-connection", daemon=True).start()


class Link:
    """A worker's end; it beats from the beginning, and ends its process when the connection breaks.

    Args:
        limit: seconds without an answer to its beats after which this process ends; 0 where a pipe says it sooner.
    """

    def __init__(self, addresses: list[str], rank: int, keys: Keys | None = None, limit: float = 0) -> None:
        beat(addresses[1], str(rank), keys, limit)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self._socket.setsockopt(zmq.IPV6, int("[" in addresses[0]))
        show_keys(self._socket, keys)
        self._closing = threading.Event()
        end_with_connection(self._socket, self._closing)
        self._socket.connect(addresses[0])

    def receive(self, timeout: float | None) -> bytes | None:
        """The next message; None when ``timeout`` seconds pass first (None waits for ever, 0 does not wait)."""
        if not self._socket.poll(None if timeout is None else int(timeout * 1000)):
            return None
        return bytes(self._socket.recv())

    def send(self, data: bytes) -> None:
        """Send one message."""
        self._socket.send(data)

    def close(self) -> None:
        """Send what is queued and let go."""
        self._closing.set()
        self._socket.close(linger=2000)
        end_context(self._context)
