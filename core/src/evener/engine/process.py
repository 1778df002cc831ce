"""Child processes and the channel to them: zmq over socket files in a folder that only this user can open.

A child gets its configuration as one JSON line on its standard input, and then watches that pipe: end-of-file means
that its parent is gone, whatever the reason, and it ends at once. So no process outlives the one that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import msgspec
import zmq

from evener import errors
from evener.config.schema import Config, to_flat
from evener.errors import EngineDeadError, EngineError
from evener.logs import stderr_level

#: Milliseconds between looks at whether the other side still lives.
_BEAT_MS = 200


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A child could not start: the class of its error and the message."""

    kind: str
    message: str

    def error(self) -> EngineError | errors.EvenerError:
        """The error to raise on this side: of the same class, or of its nearest base that takes a plain message."""
        named = getattr(errors, self.kind, None)
        for cls in named.__mro__ if isinstance(named, type) else ():
            if issubclass(cls, errors.EvenerError) and cls.__init__ is errors.EvenerError.__init__:
                return cls(self.message)
        return EngineError(self.message)


class Child:
    """A child process, ``python -m evener.engine.child ROLE ADDRESS LOG_LEVEL``, and this side's end of its channel."""

    def __init__(self, role: str, config: Config) -> None:
        self.role = role
        self._folder = tempfile.mkdtemp(prefix="evener-")
        address = f"ipc://{self._folder}/{role}"
        self._context = zmq.Context()
        # Two one-way sockets: sending and receiving may happen in two threads, and a zmq socket belongs to one.
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, end in ((self._out, "down"), (self._in, "up")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM if end == "up" else zmq.SNDHWM, 0)
            socket.bind(f"{address}.{end}")
        # The child logs as much as this process does: a server's worker says what a library's keeps to itself.
        level = str(stderr_level())
        # A session of its own: a terminal's Ctrl-C is for the supervisor, which decides what it means.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evener.engine.child", role, address, level],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(to_flat(config)).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.close()
            raise EngineDeadError(f"the {role} process ended before it read its configuration") from None

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
        """Raise ``EngineDeadError`` if the child is gone."""
        code = self.process.poll()
        if code is not None and not self._in.poll(0):
            how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise EngineDeadError(f"the {self.role} process {how}; restart the server, and see its log for the reason")

    def send(self, data: bytes) -> None:
        """Send one message.

        Raises:
            EngineDeadError: the child is gone.
        """
        try:
            self._out.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.check()
            raise EngineError(f"the {self.role} process does not take messages any more") from None

    def wait(self) -> None:
        """Wait until the child has ended by itself."""
        self.process.wait()

    def end(self, patience: float = 10.0) -> None:
        """End the child: its pipe is closed, and after ``patience`` seconds it is killed."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                self.process.stdin = None  # it is gone already
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self, patience: float = 10.0) -> None:
        """``end`` it and let go of the channel. Calling it again does nothing."""
        self.end(patience)
        if not self._in.closed:
            self._in.close()
            self._out.close()
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


class Parent:
    """A child's end of the channel."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
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
        self._in.close(linger=0)
        self._out.close(linger=2000)
        self._context.term()


def read_config(address: str) -> dict[str, Any]:
    """In a child: the configuration from the first line of standard input; then end with the parent."""
    flat: dict[str, Any] = json.loads(_read_line())
    threading.Thread(target=_end_with_parent, args=(address,), name="evener-watch", daemon=True).start()
    return flat


def _read_line() -> bytes:
    # By descriptor: a thread that blocks in a buffered reader makes the interpreter's shutdown fail.
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            os._exit(3)
        line += part
    return line


def _end_with_parent(address: str) -> None:
    while os.read(0, 1 << 16):
        pass
    # A parent that was killed could not do it.
    shutil.rmtree(os.path.dirname(address.removeprefix("ipc://")), ignore_errors=True)
    os._exit(3)
