"""Runs one part in a process of its own: whatever the process does, the part ends and the run goes on. Torch-free.

A process that dies or is silent for too long is ended, with every process of its session. What it found is kept, the
check that it was doing has failed, and another process does the checks that are left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from evener_conformance.first_contact.child import Task
from evener_conformance.first_contact.evidence_file import MOST_CASES, Case, Outcome, Part, Timing
from evener_conformance.first_contact.private_data import Redactor
from evener_conformance.kit.outcome import REQUIRED

#: Of what a process prints, this many bytes are kept, and no line to the supervisor is longer.
_PRINTED, _LINE = 16 << 10, 1 << 20
#: A part takes at most this many processes: a backend that dies in each check would go on for hours.
_PROCESSES = 20
_POLL = 0.05


@dataclass
class Findings:
    """What the processes of one part have written."""

    counts: Counter[str] = field(default_factory=Counter)
    cases: list[Case] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    facts: dict[str, dict[str, str]] = field(default_factory=lambda: {"fact": {}, "device": {}, "version": {}})
    level: tuple[str, bool] = ("", False)
    listed: dict[str, list[str]] = field(default_factory=dict)  # area → names of its checks
    done: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    note: str = ""
    not_applicable: bool = False
    ended: bool = False
    checks: int = 0

    def take(self, kind: str, value: Any, redact: Redactor) -> None:
        """One line of a process.

        Raises:
            ValueError, TypeError, LookupError, msgspec.ValidationError: it is none.
        """
        if kind == "case":
            case = msgspec.convert({k: v for k, v in value.items() if k != "area"}, Case)
            self.counts[case.outcome] += 1
            if case.outcome in ("failed", "unknown") and len(self.cases) < MOST_CASES:
                texts = {name: redact(getattr(case, name), 1_500) for name in case.__struct_fields__}
                self.cases.append(Case(**texts))
        elif kind == "check":
            self.done.append(str(value))
            self.checks += 1
        elif kind == "listed":
            area, name = value
            self.listed.setdefault(str(area), []).append(str(name))
        elif kind == "timing":
            what, seconds, size = value
            self.timings.append(Timing(redact(what, 300), float(seconds), int(size)))
        elif kind in self.facts:
            name, text = value
            self.facts[kind][redact(name, 100)] = redact(text, 1_500)
        elif kind == "level":
            self.level = (str(value[0]), bool(value[1]))
        elif kind == "error":
            self.errors.append(redact(value))
        elif kind == "not applicable":
            self.not_applicable, self.note = True, redact(value, 300)
        elif kind == "passed":
            self.note = redact(value, 300)
        elif kind == "end":
            self.ended = True
        else:
            raise ValueError(f"a line of unknown kind {kind!r}")


def run_part(
    task: Task, silence: float, redact: Redactor, stop: threading.Event | None = None, threads: int = 0
) -> tuple[Part, Findings]:
    """Run one part.

    Args:
        silence: seconds that a process may take for one check, and for opening the device.
        stop: once it is set, the processes end.
        threads: of each process for computing on the host; 0: as many as its libraries choose.
    """
    start, found, printed = time.monotonic(), Findings(), ""
    for _ in range(_PROCESSES):
        found.ended, before = False, len(found.done)
        again = msgspec.structs.replace(task, done=tuple(found.done))
        how, printed = _run_process(again, silence, found, redact, stop or threading.Event(), threads)
        if found.ended:
            printed = ""
            break
        if not task.area or len(found.done) == before:
            # It died before any check, so another process would too; or its checks build on each other.
            found.errors.append(how if not found.done else f"{found.done[-1]}: {how}")
            break
        found.counts["failed"] += 1
        if len(found.cases) < MOST_CASES:
            found.cases.append(
                Case(found.done[-1], "", "", "all", "failed", f"{how}; it printed: {printed[-800:]}", "")
            )
    else:
        found.errors.append(f"its processes died {_PROCESSES} times; the rest was not run")
    part = Part(
        task.part, _outcome(task, found), round(time.monotonic() - start, 1), "\n".join(found.errors) or found.note,
        dict(found.counts), tuple(found.cases), printed,
    )  # fmt: skip
    return part, found


def _outcome(task: Task, found: Findings) -> Outcome:
    if found.errors or found.counts["failed"] or (found.counts["unknown"] and task.area in REQUIRED):
        return "failed"
    if found.not_applicable or (task.area and not found.counts["passed"]):
        return "not applicable"
    return "passed"


def _run_process(
    task: Task, silence: float, found: Findings, redact: Redactor, stop: threading.Event, threads: int
) -> tuple[str, str]:
    """Run one process to its end. Returns how it ended and the end of what it printed, both without private data."""
    reader, writer = os.pipe()
    # The whole path, so that the child finds every package that this process finds.
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    quiet = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "KINETO_LOG_LEVEL": "99", "PYTHONUNBUFFERED": "1"}
    limits = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "evener_conformance.first_contact.child", str(writer)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
                env={**limits, **os.environ, **quiet, "PYTHONPATH": path}, pass_fds=(writer,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writer)
        assert process.stdin is not None and process.stdout is not None
        stack.callback(process.stdout.close)
        stack.callback(_end, process)
        with contextlib.suppress(BrokenPipeError):  # it ended already: its exit code says more
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
        return _follow(process, process.stdout.fileno(), reader, silence, found, redact, stop)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End every process of its session's group, in whatever state it is."""
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _follow(
    process: subprocess.Popen[bytes], output: int, reader: int, silence: float, found: Findings, redact: Redactor,
    stop: threading.Event,
) -> tuple[str, str]:  # fmt: skip
    """Read what it writes until it ends or is silent for too long."""
    printed, pending, heard = b"", b"", time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        selector.register(output, selectors.EVENT_READ)
        how = ""
        while not how:
            over = process.poll() is not None
            # A program that it started may hold the pipes open: when the process has ended, its output is complete.
            ready = selector.select(0 if over else _POLL)
            for key, _ in ready:
                data = os.read(key.fd, 64 << 10)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == output:
                    printed = (printed + data)[-_PRINTED:]
                else:
                    heard = time.monotonic()
                    *lines, pending = (pending + data).split(b"\n")
                    how = how or _take_all(lines, found, redact)
            if len(pending) > _LINE:
                how = how or "it wrote a line that is too long"
            if over and not ready:
                how = how or _exit_text(process.returncode)
            elif stop.is_set():
                how = how or "the run was interrupted"
            elif time.monotonic() - heard > silence:
                how = how or f"it was ended: nothing was heard of it for {silence:g} seconds"
    return how, redact(printed.decode(errors="replace"), 3_000)


def _take_all(lines: list[bytes], found: Findings, redact: Redactor) -> str:
    """Take lines of a process; why they are wrong, or nothing."""
    for line in lines:
        try:
            kind, value = msgspec.json.decode(line)
            found.take(kind, value, redact)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return f"it wrote a line that is not of this program: {redact(str(error), 200)}"
    return ""


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
