"""``evener serve`` as a process, and a tiny model for it, for tests that go the whole way."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from warm import CHILDREN, warm

from evener_conformance.naive.model import find_architecture
from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

#: Seconds for whatever must happen some time; a machine with other work is slow.
PATIENCE = 120.0
EVENER = Path(sys.executable).with_name("evener")


def tiny_model(folder: Path, tokenizer: bool = True, positions: int = 4096) -> Path:
    """A folder for ``load=dummy``: a Llama of a few thousand weights, with a tokenizer of bytes unless not wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        write_tiny_tokenizer(folder)
    shape = {**find_architecture("LlamaForCausalLM").tiny_config(), "max_position_embeddings": positions}
    shape["vocab_size"] = VOCAB_SIZE
    (folder / "config.json").write_text(json.dumps(shape), "utf-8")
    return folder


#: Runs as Python starts, and only in a worker: holds it until the file is there.
_HOLD = """
import sys
import time
from pathlib import Path

if sys.orig_argv[2:4] == ["evener.engine.processes.child", "worker"]:
    from evener.engine.worker.worker import Worker

    held = Worker.{method}

    def hold(self, *given, **named):
        if {when}:
            while not Path({file!r}).exists():
                time.sleep(0.01)
        return held(self, *given, **named)

    Worker.{method} = hold
"""


class Hold:
    """Worker processes that stop in the middle of their work and go on when they are let go: whatever a test does
    meanwhile comes before that, also where the machine gives the test no time.

    Args:
        folder: an empty one.
        step: the step that does not begin; None: not even the model is loaded.

    Attributes:
        environ: the variables with which a server has such workers.
    """

    def __init__(self, folder: Path, step: int | None) -> None:
        self._file = folder / "go on"
        method, when = ("__init__", "True") if step is None else ("execute", f"given[0].id >= {step}")
        (folder / "sitecustomize.py").write_text(_HOLD.format(method=method, when=when, file=str(self._file)))
        self.environ = {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def release(self) -> None:
        """Go on, for good."""
        self._file.touch()


class Served:
    """A server that is ready, its URL and its log so far. Leaving the context ends it."""

    def __init__(self, *command: str | Path) -> None:
        # A group of its own: a launcher (torchrun) that is killed leaves its children behind, and the pipe open.
        self.process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.url = self.wait_for(r"serving \S+ at (http://127\.0\.0\.1:\d+) on backend").group(1)
            self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
            eventually(lambda: self.get("/ready").status_code == 200)
        except BaseException:
            self.close()
            raise

    @classmethod
    def model(cls, folder: Path, *settings: str) -> Served:
        """``evener serve FOLDER serve.port=0 SETTINGS``."""
        return cls(EVENER, "serve", folder, "serve.port=0", *settings)

    @classmethod
    def warm(cls, folder: Path, *settings: str) -> Served:
        """The same in warm processes, its controller and worker too. For tests of answers: a command of ``warm`` is no
        child of its starter."""
        environ = f"{CHILDREN}={warm() / 'python'}"
        return cls("env", environ, warm() / "evener", "serve", folder, "serve.port=0", *settings)

    @property
    def log(self) -> str:
        """What it has written to standard error."""
        return "".join(self._lines)

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return str(self.get("/v1/models").json()["data"][0]["id"])

    def get(self, path: str) -> httpx.Response:
        """GET, on a connection that is closed if the server has closed it."""
        return self.http.get(path)

    def stats(self) -> dict[str, int]:
        """``GET /stats``."""
        return dict(self.get("/stats").raise_for_status().json())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the log has ``pattern``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or re.search(pattern, self.log), PATIENCE)
            found = re.search(pattern, self.log)
        assert found is not None, f"no {pattern!r} in the log:\n{self.log}"
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """End it, whatever state it is in."""
        if hasattr(self, "http"):
            self.http.close()
        # torchrun's workers have sessions of their own: the group's signal does not reach them.
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        # Closing a file that a thread still reads would wait for ever.
        assert not self._reader.is_alive(), f"a process that outlived it holds its standard error; its log:\n{self.log}"
        assert self.process.stderr is not None
        self.process.stderr.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below ``pid``. Of any of its threads: the kernel lists children by thread."""
    found: dict[int, str] = {}
    # Any of them may end while it is looked at.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                found.update(descendants(child))
    return found


def free_port(count: int = 1) -> int:
    """A port that nobody has, and that the kernel gives to nobody who asks for any: to no connection and no server of
    another test before it is bound. It is the first of ``count`` such ports in a row."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, first), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port
    raise AssertionError(f"no port from 10000 to {first} is free")


def eventually(condition: Callable[[], Any]) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
