"""One ``evener serve`` as a child process: its start, its address, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import httpx

from evener.errors import EngineError

#: Lines of the child's log that the error of a failed start shows.
_SHOWN = 15
_POLL_SECONDS = 0.1


class EngineProcess:
    """A server that is ready, on a free port of this machine that only this machine reaches.

    Args:
        words: what ``evener serve`` gets: the model, and keys.
        environ: variables in addition to those of this process.
        on_end: is called, in a thread, if the child ends by itself after it was ready.
        limit: seconds until it must be ready; 0: no limit.

    Attributes:
        url: its URL.

    Raises:
        EngineError: it ended before it was ready, or was not ready in time; the message has the end of its log.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], on_end: Callable[[int], None], limit: float = 0.0
    ) -> None:
        reserved = reserve_port()
        port = int(reserved.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        watched, self._held = os.pipe()
        command = [sys.executable, "-m", "evener_deploy.child", str(watched), "serve", *words]
        # Last, so that they win: the address is the deployment's, not the replica's.
        command += ["serve.host=127.0.0.1", f"serve.port={port}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pass_fds=(watched,),
            env={**os.environ, **environ},
        )  # fmt: skip
        os.close(watched)
        self._limit = limit
        self._last, self._stopping, self._on_end = deque[str](maxlen=_SHOWN), False, on_end
        self._reader = threading.Thread(target=self._read, name="log", daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop(0)
            raise
        finally:
            reserved.close()
        threading.Thread(target=self._watch, name="end", daemon=True).start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    def stop(self, timeout: float = 60.0) -> int:
        """Let running requests end for ``timeout`` seconds, then end the child. Returns its exit status."""
        self._stopping = True
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._reader.join()
            if self._held >= 0:
                os.close(self._held)
                self._held = -1

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while True:
                if not self.alive:
                    self._reader.join()
                    raise EngineError(f"evener serve ended with status {self._process.returncode} before it was "
                                      f"ready; {self._log()}")  # fmt: skip
                if self._limit and time.monotonic() - began > self._limit:
                    raise EngineError(f"evener serve was not ready within {self._limit:g} s; give it more time with "
                                      f"--start-timeout; {self._log()}")  # fmt: skip
                try:
                    if client.get("/ready").status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # it does not listen yet
                time.sleep(_POLL_SECONDS)

    def _log(self) -> str:
        return "the end of its log:\n" + ("".join(self._last).strip() or "it wrote nothing")

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._last.append(line)
                sys.stderr.write(line)

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._stopping:
            self._on_end(code)


def reserve_port() -> socket.socket:
    """A bound socket whose port no other program gets while it is open, but a server that listens on the same address
    with SO_REUSEADDR, as ours do: that works as long as this socket does not listen."""
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
    except BaseException:
        reserved.close()
        raise
    return reserved


def free_port() -> int:
    """A port that nobody has now, for who cannot keep it reserved."""
    with reserve_port() as reserved:
        return int(reserved.getsockname()[1])
