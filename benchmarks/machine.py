"""Where and with what a figure was measured: hardware, versions, and how much of the machine others used."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGES = (
    "evener", "evener-server", "evener-models", "evener-backend-cpu", "torch", "transformers", "llama-cpp-python",
    "numpy",
)  # fmt: skip
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """The processor's own name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Memory of the machine."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def versions() -> dict[str, str]:
    """Versions of what is installed here and may matter."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, Any]:
    """What every result file says of its machine."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
    }


def family(pid: int | None = None) -> list[int]:
    """A process and everything below it. The kernel lists children by thread."""
    found, todo = [], [pid or os.getpid()]
    while todo:
        found.append(one := todo.pop())
        try:
            for thread in Path(f"/proc/{one}/task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
        except OSError:
            continue  # it has ended meanwhile
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of those processes so far."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def busy_seconds() -> float:
    """Processor time of everybody so far."""
    values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(values) - values[3] - values[4] - values[7]) / _TICKS


class Others:
    """While the block runs: how many cores went to processes that are not below this one.

    Attributes:
        cores: set at the end.
    """

    cores: float = 0.0

    def __enter__(self) -> Others:
        self._pids = family()
        self._busy, self._ours, self._began = busy_seconds(), cpu_seconds(self._pids), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        others = busy_seconds() - self._busy - (cpu_seconds(self._pids) - self._ours)
        self.cores = round(max(0.0, others) / seconds, 2)
