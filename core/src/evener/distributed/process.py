"""Child processes and the channel to them: zmq over socket files in a folder that only this user can open.

A child gets its configuration as one JSON line on its standard input, and then watches that pipe: end-of-file means
that its parent is gone, whatever the reason, and it ends at once. So no process outlives the one that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import msgspec
import zmq

from evener import errors
from evener.config.schema import Config, to_flat
from evener.distributed.hub import end_context, end_with_connection
from evener.distributed.pulse import Pulse, beat
from evener.errors import EngineDeadError, EngineError
from evener.logs import stderr_level
from evener.run_folder import RunFolder

#: Linux: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Milliseconds between looks at whether the other side still lives.
_BEAT_MS = 200


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A child could not start: the class of its error and the message."""

    kind: str
    message: str

    def error(self, origin: str = "") -> errors.EvenerError:
        """The error to raise on this side: of the same class, or of its nearest base that takes a plain message, which
        begins with ``origin``."""
        named = getattr(errors, self.kind, None)
        for cls in named.__mro__ if isinstance(named, type) else ():
            if issubclass(cls, errors.EvenerError) and cls.__init__ is errors.EvenerError.__init__:
                return cls(origin + self.message)
        return EngineError(origin + self.message)


class Process:
    """A process of this run, ``python -m evener.engine.child ROLE LOG_LEVEL``, which ends when this one does.

    Args:
        role: "worker" or "controller".
        name: what a person calls it.
        orders: plain data for its ``read_orders``.
        environment: variables for it, where they are not set.
    """

    def __init__(
        self, role: str, name: str, config: Config, orders: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        # The child logs as much as this process does: a server's worker says what a library's keeps to itself.
        level = str(stderr_level())
        # A session of its own: a terminal's Ctrl-C is for the supervisor, which decides what it means.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evener.engine.child", role, level],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**(environment or {}), **os.environ},
        )
        # The kernel's own signal follows the thread that started the child; only the main one lives as long as we do.
        bound = threading.current_thread() is threading.main_thread()
        line = json.dumps({**orders, "config": to_flat(config), "bound": bound}).encode()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.end(0)
            raise EngineDeadError(f"the {name} process ended before it read its configuration") from None

    def how_it_ended(self) -> str | None:
        """What became of it, in words; None while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} process {how}"

    def let_go(self) -> None:
        """Close its pipe: it ends soon, unless it hangs."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                self.process.stdin = None  # it is gone already

    def end(self, patience: float = 10.0) -> None:
        """``let_go``, and kill it after ``patience`` seconds."""
        self.let_go()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Child:
    """A child process and this side's end of a channel to it.

    Args:
        silence: seconds without a beat after which it is taken for dead; 0: never.
    """

    def __init__(self, role: str, config: Config, silence: float = 0) -> None:
        self.role, self._silence = role, silence
        self._folder = RunFolder()
        address = self._folder.socket(role)
        self._context = zmq.Context()
        # Two one-way sockets: sending and receiving may happen in two threads, and a zmq socket belongs to one.
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, end in ((self._out, "down"), (self._in, "up")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM if end == "up" else zmq.SNDHWM, 0)
            socket.bind(f"{address}.{end}")
        beats = self._context.socket(zmq.ROUTER)
        beats.bind(f"{address}.beats")
        self._pulse = Pulse(beats)
        self._pulse.expect(role)
        try:
            self._child = Process(role, role, config, {"address": address})
        except BaseException:
            self._close_channel()
            raise
        self.process = self._child.process

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message; None when ``timeout`` seconds pass first.

        Raises:
            EngineDeadError: the child is gone and left no message.
        """
        waited = 0.0
        while True:
            step = _BEAT_MS if timeout is None else min(_BEAT_MS, max(0, int((timeout - waited) * 1000)))
            if self._in.poll(step):
                return bytes(self._in.recv())
            waited += step / 1000
            self.check()
            if timeout is not None and waited >= timeout:
                return None

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the child is gone or silent; then it is killed."""
        how = self._child.how_it_ended()
        silent = self._pulse.silence(self.role)
        if how is None and self._silence and silent > self._silence:
            self._child.end(0)
            how = f"the {self.role} process gave no sign of life for {silent:.0f} s"
        # Its last words may still be on their way through zmq's own thread.
        if how is not None and not self._in.poll(_BEAT_MS):
            raise EngineDeadError(f"{how}; restart the server, and see its log for the reason")

    def send(self, data: bytes) -> None:
        """Send one message. What the child said before it went is still there for ``receive``.

        Raises:
            EngineDeadError: the child has not connected, or its connection is closed and it is gone or goes.
        """
        try:
            self._out.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(f"the {self.role} process is not connected") from None

    def wait(self) -> None:
        """Wait until the child has ended by itself; one that falls silent is killed."""
        while self._child.how_it_ended() is None:
            try:
                self.process.wait(_BEAT_MS / 1000)
            except subprocess.TimeoutExpired:
                if self._silence and self._pulse.silence(self.role) > self._silence:
                    self._child.end(0)

    def end(self, patience: float = 10.0) -> None:
        """End the child: its pipe is closed, and after ``patience`` seconds it is killed."""
        self._child.end(patience)

    def close(self, patience: float = 10.0) -> None:
        """``end`` it and let go of the channel. Calling it again does nothing."""
        self.end(patience)
        if not self._in.closed:
            self._close_channel()

    def _close_channel(self) -> None:
        self._pulse.close()
        self._in.close()
        self._out.close()
        end_context(self._context)
        self._folder.close()


class Parent:
    """A child's end of the channel.

    Args:
        limit: seconds without an answer to its beats after which this process ends; 0: never.
    """

    def __init__(self, address: str, limit: float) -> None:
        beat(f"{address}.beats", os.path.basename(address), limit=limit)
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._closing = threading.Event()
        for socket in (self._in, self._out):
            end_with_connection(socket, self._closing)
        self._in.connect(f"{address}.down")
        self._out.connect(f"{address}.up")

    def receive(self, timeout: float | None) -> bytes | None:
        """The next message; None when ``timeout`` seconds pass first (None waits for ever, 0 does not wait)."""
        if not self._in.poll(None if timeout is None else int(timeout * 1000)):
            return None
        return bytes(self._in.recv())

    def send(self, data: bytes) -> None:
        """Send one message."""
        self._out.send(data)

    def close(self) -> None:
        """Send what is queued and let go."""
        self._closing.set()
        self._in.close(linger=0)
        self._out.close(linger=2000)
        end_context(self._context)


def read_orders() -> dict[str, Any]:
    """In a child: what its parent wrote on standard input; from then on it ends with the parent."""
    orders: dict[str, Any] = json.loads(_read_line())
    if orders["bound"]:
        # Unlike the thread below, the kernel also ends a process that is stopped.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, name="evener-watch", daemon=True).start()
    return orders


def _read_line() -> bytes:
    # By descriptor: a thread that blocks in a buffered reader makes the interpreter's shutdown fail.
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            os._exit(3)
        line += part
    return line


def _end_with_parent() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(3)
