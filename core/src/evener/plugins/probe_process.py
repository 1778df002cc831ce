"""One probe's child process, seen from the parent: start it, see whether it ended, end it with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evener.contracts.probe import ProbeResult
from evener.errors import ProbeError
from evener.plugins import probe_wire
from evener.plugins.catalog import Package
from evener.run_folder import RunFolder


class ProbeProcess:
    """A running probe in a process group and a scratch folder of its own.

    Args:
        package: a backend whose probe module has ``probe()``.
        seconds: its time limit, counted from now.
    """

    def __init__(self, package: Package, seconds: float) -> None:
        self.package = package
        self.seconds = seconds
        self.started = time.monotonic()
        self._scratch = RunFolder()
        self._result = Path(self._scratch.path, "result.json")
        self._output = Path(self._scratch.path, "output.txt")
        try:
            self._process = self._spawn()
        except BaseException:
            self._scratch.close()
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        # The parent's whole path: a package that the parent found must be found by the child, wherever it lies.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        probe = self.package.descriptor.probe or ""
        with self._output.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "evener.plugins.probe_child", probe, str(self._result), str(self.seconds)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._scratch.path,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Whether the child ended by itself. It is not reaped, so that its process group stays ours to kill."""
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # the host program ignores SIGCHLD: the kernel reaped it
            return True

    def overdue(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() - self.started > self.seconds

    def outcome(self) -> ProbeResult | ProbeError:
        """What came of it; call once, when it ended or is overdue. Ends every process that it started."""
        hung = not self.ended()
        try:
            self._kill()
            if self._process.returncode == -signal.SIGALRM or hung:
                limit = "probe_timeout of its descriptor, or EVENER_PROBE_TIMEOUT"
                return self._error(f"did not answer within {self.seconds:g} seconds ({limit})")
            if not self._result.exists():
                return self._error(f"ended without an answer ({_exit_text(self._process.returncode)})")
            return self._answer(json.loads(self._result.read_text()))
        finally:
            self._scratch.close()

    def close(self) -> None:
        """End it and everything it started, whatever state it is in."""
        self._kill()
        self._scratch.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # already reaped, and nothing of its group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _answer(self, data: dict[str, Any]) -> ProbeResult | ProbeError:
        if "result" in data:
            return probe_wire.decode(data["result"])
        return self._error(f"raised {data['error']}", data["traceback"])

    def _error(self, what: str, detail: str = "") -> ProbeError:
        """The message, with the end of what the child printed as an added cause."""
        error = ProbeError(f"{self.package}: its probe {what}")
        printed = self._output.read_text(errors="replace")[-2000:].strip()
        detail = "\n".join(part for part in (detail.strip(), printed and f"it printed:\n{printed}") if part)
        if detail:
            error.__cause__ = RuntimeError(detail)
        return error


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
