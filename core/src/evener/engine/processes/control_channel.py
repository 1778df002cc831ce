"""The control channel between a controller and its workers: plans go to every worker, results and failures come back.

On one machine it uses socket files in a folder that only this user can open. Between machines it uses TCP, encrypted,
and accepts only workers that have the run's ``keys``. It carries msgpack messages and never tensors: ranks exchange
tensors through communicators.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from evener.distributed.contact import CurveServer, Keys, set_curve_keys
from evener.engine.processes.heartbeat import EXIT_DISCONNECTED, HeartbeatMonitor, start_heartbeat
from evener.errors import EngineDeadError
from evener.folders.run import RunFolder

log = logging.getLogger("evener.engine")
#: The message that ends a worker which this process did not start. A child ends when its pipe is closed.
SHUTDOWN = b""
#: Seconds to wait for zmq's threads when a channel is closed.
_TERMINATE_TIMEOUT = 10.0


class ControlServer:
    """The controller's end. Used by one thread at a time.

    Args:
        host: the address under which other machines reach this one; None keeps the channel on this machine.

    Attributes:
        folder: holds files of this run.
        addresses: two addresses for a ``ControlClient``: for messages, and for heartbeats.
        keys: what a client needs to be accepted; None on one machine.
        heartbeats: watches the workers; their names are the ranks as text.
    """

    def __init__(self, host: str | None = None) -> None:
        self._context = zmq.Context()
        self.folder = RunFolder()
        self._guard = None if host is None else CurveServer(self._context)
        self.keys = None if self._guard is None else self._guard.keys
        places = (self.folder.socket(name) if host is None else f"tcp://{host}:*" for name in ("ranks", "beats"))
        self._socket, beats = map(self._bind, places)
        self.addresses = [str(socket.getsockopt_string(zmq.LAST_ENDPOINT)) for socket in (self._socket, beats)]
        self.heartbeats = HeartbeatMonitor(beats)

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
            EngineDeadError: the connection to it is closed.
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

    def has_message(self, timeout: float) -> bool:
        """Whether a message for ``receive`` is there, or arrives within ``timeout`` seconds."""
        return bool(self._socket.poll(int(timeout * 1000)))

    def close(self) -> None:
        """Close all sockets and remove the run's files. Calling it again does nothing."""
        if not self._socket.closed:
            self.heartbeats.close()
            self._socket.close()
            if self._guard is not None:
                self._guard.close()
            terminate_context(self._context)
            self.folder.close()


def terminate_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Terminate a context whose sockets are closed. Unlike zmq's own ``term`` it waits for zmq's threads only a limited
    time: a process that has reported why it ends must end, also if a thread hangs."""
    ending = threading.Thread(target=context.term, name="evener-end", daemon=True)
    try:
        ending.start()
    except RuntimeError:
        return  # the interpreter is shutting down: it starts no threads, and ends zmq's
    ending.join(_TERMINATE_TIMEOUT)
    if ending.is_alive():
        log.warning("zmq did not close its sockets within %.0f s; this process ends anyway", _TERMINATE_TIMEOUT)


def exit_on_disconnect(socket: zmq.Socket[bytes], closing: threading.Event) -> None:
    """Let this process end with ``EXIT_DISCONNECTED`` when the connection of ``socket`` breaks, unless ``closing`` is
    set. zmq would connect again, but messages may be lost with a connection. Call it before the socket connects."""
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)

    def watch() -> None:
        with contextlib.suppress(zmq.ContextTerminated):  # closed from this side
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED and not closing.is_set():
                os._exit(EXIT_DISCONNECTED)
        monitor.close(linger=0)

    threading.Thread(target=watch, name="evener-connection", daemon=True).start()


class ControlClient:
    """A worker's end. It sends heartbeats from the start, and ends this process when the connection breaks.

    Args:
        timeout: seconds without an answer to its heartbeats after which this process ends; 0 (never) for a child of the
            controller, which watches a pipe.
    """

    def __init__(self, addresses: list[str], rank: int, keys: Keys | None = None, timeout: float = 0) -> None:
        start_heartbeat(addresses[1], str(rank), keys, timeout)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self._socket.setsockopt(zmq.IPV6, int("[" in addresses[0]))
        set_curve_keys(self._socket, keys)
        self._closing = threading.Event()
        exit_on_disconnect(self._socket, self._closing)
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
        """Send what is queued, and close the sockets."""
        self._closing.set()
        self._socket.close(linger=2000)
        terminate_context(self._context)
