"""Renders chat templates with limits on time and memory.

Nothing inside a Python process can stop a C call that runs for ever, so templates are rendered in a child process that
imports only jinja2. It starts with the first chat and limits its own memory. If a template takes too long, the process
is killed, and the next chat starts a new one. The limit is CPU time, so that a busy machine does not cause timeouts.
The child ends when its parent ends, because its standard input closes.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from evener.errors import RenderTimeoutError, TemplateError

#: The child gets the parent's sys.path: it imports the same packages, and nothing from the working directory.
_START = (
    "import sys; sys.path[:] = {path!r}; from evener_formats.chat.render_worker import main; main({memory}, {limit})"
)
#: For starting Python and importing jinja2 on a busy machine; does not count as a template's time.
_START_LIMIT_S = 60.0
#: The limit on a template's wall-clock time is this many times its CPU time limit.
_WALL_CLOCK_FACTOR = 12


class Renderer:
    """One render process, started when needed. Safe to use from several threads; they take turns.

    Args:
        time_limit: seconds of CPU time for one template.
        memory_limit: bytes that rendering may use.
    """

    def __init__(self, time_limit: float = 5.0, memory_limit: int = 512 << 20) -> None:
        self._time_limit, self._memory_limit = time_limit, memory_limit
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, template: str, messages: list[dict[str, Any]], continue_final_message: bool, variables: dict[str, Any]
    ) -> str:
        """The rendered text.

        Raises:
            TemplateError: the template refused the messages, took too long, or needs too much memory.
        """
        request = {
            "template": template, "messages": messages, "continue_final_message": continue_final_message,
            "variables": variables,
        }  # fmt: skip
        with self._lock:
            try:
                line = json.dumps(request).encode() + b"\n"
            except RecursionError as error:
                raise TemplateError("the messages are nested too deeply", "messages") from error
            answer = self._ask(line)
        if "error" in answer:
            raise TemplateError(f"the chat template refused the messages: {answer['error']}", "messages")
        return answer["text"]

    def start(self) -> None:
        """Start the process now instead of with the first ``render``.

        Raises:
            TemplateError: it does not start.
        """
        with self._lock:
            self._started()

    def close(self) -> None:
        """Stop the process; a later ``render`` starts another."""
        with self._lock:
            self._stop()

    def interrupt(self) -> None:
        """End the ``render`` that runs now, from another thread; the next one starts a new process."""
        process = self._process
        if process is not None:
            process.kill()

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._started()
        assert process.stdin is not None, "made with a pipe"
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = self._answer(process, self._time_limit * _WALL_CLOCK_FACTOR)
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            self._stop()
            if isinstance(error, TimeoutError):
                message = f"rendering the messages took longer than {self._time_limit:g} s: try again"
                raise RenderTimeoutError(message, "messages", "deadline_exceeded") from error
            if process.returncode == -signal.SIGPROF:
                return {"error": f"rendering took longer than {self._time_limit:g} s and was stopped"}
            most = self._memory_limit >> 20
            return {"error": f"rendering it ended the render process; did it need more than {most} MiB of memory?"}
        except BaseException:
            # A late answer must not be taken for the answer to the next request.
            self._stop()
            raise
        answered: dict[str, str] = json.loads(answer)
        return answered

    def _answer(self, process: subprocess.Popen[bytes], limit: float) -> bytes:
        """Read one line.

        Raises:
            TimeoutError: it did not come in time.
            EOFError: the process has ended.
        """
        assert process.stdout is not None, "made with a pipe"
        deadline = time.monotonic() + limit
        pieces: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not (pieces and pieces[-1].endswith(b"\n")):
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise EOFError
                pieces.append(piece)
        return b"".join(pieces)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        program = _START.format(path=sys.path, memory=self._memory_limit, limit=self._time_limit)
        # Its own session: Ctrl-C goes to the parent only, which then closes the pipe.
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            self._answer(self._process, _START_LIMIT_S)
        except (EOFError, TimeoutError) as error:
            self._stop()
            message = f"the process that renders chat templates did not start: {error!r}"
            raise TemplateError(message, "messages") from error
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "made with pipes"
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # unwritten data for a process that has ended
