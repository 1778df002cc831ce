"""Child processes: starting and ending one, and the channel between it and its parent.

A child reads its configuration as one JSON line from its standard input, and watches that pipe from then on. End of
file means that its parent has ended, for whatever reason, and the child ends at once. So no process outlives the one
that started it. The channel is zmq over socket files in a folder that only this user can open.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec
import zmq

from evener import errors
from evener.config.schema import Config, to_flat
from evener.engine.processes.control_channel import exit_on_disconnect, terminate_context
from evener.engine.processes.heartbeat import EXIT_DISCONNECTED, EXIT_PARENT_LOST, HeartbeatMonitor, start_heartbeat
from evener.engine.wire.child_spec import ChildSpec
from evener.engine.wire.messages import FromController, LoadAdapter, ToController
from evener.errors import EngineDeadError, EngineError
from evener.folders.run import RunFolder
from evener.logs import stderr_level

#: The program of a child. A child imports this module, so this module cannot import it.
_CHILD_MODULE = f"{__package__}.child"
#: The option of Linux's ``prctl`` for the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Milliseconds between two checks whether the other side is alive.
_POLL_MS = 200
#: The end of messages about a process that has died.
ADVICE = "restart the server; its log may say more"
_LIKELY_CAUSES = {
    -signal.SIGKILL: " (the system may have run out of memory: see dmesg)",
    -signal.SIGSEGV: " (a kernel or a library crashed)",
    -signal.SIGABRT: " (a kernel or a library gave up)",
    EXIT_PARENT_LOST: " (it lost the contact to its parent process)",
    EXIT_DISCONNECTED: " (its connection to its parent process broke)",
}


class ChildFailure(msgspec.Struct, frozen=True, tag="failed"):
    """A child has failed: the class name and the message of its error."""

    kind: str
    message: str

    def error(self, origin: str = "") -> errors.EvenerError:
        """The error to raise in the parent: of the same class, or of its nearest base class whose only argument is a
        message. The message begins with ``origin``."""
        named = getattr(errors, self.kind, None)
        for cls in named.__mro__ if isinstance(named, type) else ():
            if issubclass(cls, errors.EvenerError) and cls.__init__ is errors.EvenerError.__init__:
                return cls(origin + self.message)
        return EngineError(origin + self.message)


_FAILED = msgspec.msgpack.Decoder(ChildFailure)
_MESSAGES = msgspec.msgpack.Decoder(ToController)
_ENCODER = msgspec.msgpack.Encoder()


def read_failure(data: bytes) -> ChildFailure | None:
    """The message of a child as a ``ChildFailure``; None if it is another message."""
    try:
        return _FAILED.decode(data)
    except msgspec.ValidationError:
        return None


def describe_silence(name: str, seconds: float) -> str:
    """The message about a process that sends no heartbeats, with the likely causes."""
    causes = "it may be stopped, cut off, or in one long library call: see infer.heartbeat_timeout"
    return f"the {name} process sent no heartbeat for {seconds:.0f} s ({causes})"


class ChildProcess:
    """A child process that runs ``child.main``. It ends when this process does.

    Args:
        role: "worker" or "controller".
        name: the process in messages.
        spec: what the child gets from ``read_spec``.
        environment: environment variables of the child, where this process has not set them.

    Raises:
        EngineDeadError: it ended at once.
    """

    def __init__(self, role: str, name: str, spec: ChildSpec, environment: dict[str, str] | None = None) -> None:
        self.name = name
        # The child logs at this process's level: a server logs more than a program that uses the library.
        level = str(stderr_level())
        # In a session of its own the child gets no Ctrl-C from the terminal: this process decides what that means.
        command, env = [sys.executable, "-m", _CHILD_MODULE, role, level], {**(environment or {}), **os.environ}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=env)
        # Linux sends the signal when the thread that started the child ends; only the main thread lives to the end.
        bound = threading.current_thread() is threading.main_thread()
        line = msgspec.json.encode(msgspec.structs.replace(spec, bound=bound))
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.end(0)
            raise EngineDeadError(f"the {name} process ended before it read its configuration; {ADVICE}") from None

    def exit_description(self) -> str | None:
        """How the process ended and the likely cause, for messages; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} process {how}{_LIKELY_CAUSES.get(code, '')}"

    def close_stdin(self) -> None:
        """Close its standard input: it ends soon, unless it hangs."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                self.process.stdin = None  # it has ended already

    def end(self, timeout: float = 10.0) -> None:
        """Close its standard input, and kill it if it still runs after ``timeout`` seconds."""
        self.close_stdin()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ChildChannel:
    """A child process and the parent's end of a channel to it.

    Args:
        heartbeat_timeout: seconds without a heartbeat after which the child counts as dead; 0: never.
    """

    def __init__(self, role: str, config: Config, heartbeat_timeout: float = 0) -> None:
        self.role, self._heartbeat_timeout = role, heartbeat_timeout
        self._folder = RunFolder()
        address = self._folder.socket(role)
        self._context = zmq.Context()
        # Two one-way sockets: one thread may send while another receives, and a zmq socket belongs to one thread.
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, end in ((self._out, "down"), (self._in, "up")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM if end == "up" else zmq.SNDHWM, 0)
            socket.bind(f"{address}.{end}")
        beats = self._context.socket(zmq.ROUTER)
        beats.bind(f"{address}.beats")
        self._heartbeats = HeartbeatMonitor(beats)
        self._heartbeats.register(role)
        try:
            self._child = ChildProcess(role, role, ChildSpec(config=to_flat(config), address=address))
        except BaseException:
            self._close_channel()
            raise
        self.process = self._child.process

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message; None when ``timeout`` seconds pass first.

        Raises:
            EngineDeadError: the child has died, and all its messages were received.
        """
        waited = 0.0
        while True:
            step = _POLL_MS if timeout is None else min(_POLL_MS, max(0, int((timeout - waited) * 1000)))
            if self._in.poll(step):
                return bytes(self._in.recv())
            waited += step / 1000
            self.check()
            if timeout is not None and waited >= timeout:
                return None

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the child has ended, or sends no heartbeats; then it is killed."""
        how = self._child.exit_description()
        silent = self._heartbeats.seconds_since_last(self.role)
        if how is None and self._heartbeat_timeout and silent > self._heartbeat_timeout:
            self._child.end(0)
            how = describe_silence(self.role, silent)
        # Its last messages may still be on their way through zmq's thread.
        if how is not None and not self._in.poll(_POLL_MS):
            raise EngineDeadError(f"{how}; {ADVICE}")

    def send(self, data: bytes) -> None:
        """Send one message. After an error ``receive`` still returns what the child sent before.

        Raises:
            EngineDeadError: the child has not connected yet, or its connection is closed because it has died.
        """
        try:
            self._out.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(f"the {self.role} process is not connected: it is starting or has died") from None

    def wait(self) -> None:
        """Wait until the child ends by itself; one that sends no heartbeats is killed."""
        while self._child.exit_description() is None:
            try:
                self.process.wait(_POLL_MS / 1000)
            except subprocess.TimeoutExpired:
                if self._heartbeat_timeout and self._heartbeats.seconds_since_last(self.role) > self._heartbeat_timeout:
                    self._child.end(0)

    def end(self, timeout: float = 10.0) -> None:
        """End the child as ``ChildProcess.end`` does."""
        self._child.end(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """``end`` the child and close the channel. Calling it again does nothing."""
        self.end(timeout)
        if not self._in.closed:
            self._close_channel()

    def _close_channel(self) -> None:
        self._heartbeats.close()
        self._in.close()
        self._out.close()
        terminate_context(self._context)
        self._folder.close()


class ParentChannel:
    """A controller's mailbox: its end of the channel. It ends this process when the connection breaks.

    Args:
        timeout: seconds without an answer to its heartbeats after which this process ends; 0: never.
    """

    def __init__(self, address: str, timeout: float) -> None:
        start_heartbeat(f"{address}.beats", os.path.basename(address), timeout=timeout)
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._closing = threading.Event()
        for socket in (self._in, self._out):
            exit_on_disconnect(socket, self._closing)
        self._in.connect(f"{address}.down")
        self._out.connect(f"{address}.up")

    def take(self, timeout: float) -> list[ToController]:
        """As ``Mailbox.take``."""
        messages: list[ToController] = []
        while self._in.poll(0 if messages else int(timeout * 1000)):
            messages.append(_MESSAGES.decode(self._in.recv()))
            if isinstance(messages[-1], LoadAdapter):  # a step runs after each piece of an adapter
                break
        return messages

    def put(self, events: Sequence[FromController]) -> None:
        """As ``Mailbox.put``."""
        self.send(_ENCODER.encode(list(events)))

    def send(self, data: bytes) -> None:
        """Send one message."""
        self._out.send(data)

    def close(self) -> None:
        """Send what is queued, and close the sockets."""
        self._closing.set()
        self._in.close(linger=0)
        self._out.close(linger=2000)
        terminate_context(self._context)


def read_spec() -> ChildSpec:
    """In a child: read what its parent wrote on standard input. From then on the child ends when the parent does."""
    spec: ChildSpec = msgspec.json.decode(_read_line(), type=ChildSpec)
    if spec.bound:
        # The signal also ends a process that is stopped; the thread below would not run then.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_with_parent, name="evener-watch", daemon=True).start()
    return spec


def _read_line() -> bytes:
    # Not through ``sys.stdin``: the interpreter cannot shut down while a thread blocks in a buffered reader.
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            os._exit(EXIT_PARENT_LOST)
        line += part
    return line


def _exit_with_parent() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(EXIT_PARENT_LOST)
