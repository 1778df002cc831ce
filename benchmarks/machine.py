"""The conditions of a measurement: hardware, versions, and how much of the machine other processes used."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGES = (
    "evener", "evener-server", "evener-models", "evener-backend-cpu", "torch", "transformers", "llama-cpp-python",
    "numpy",
)  # fmt: skip
_TICKS = os.sysconf("SC_CLK_TCK")


def record(row: Mapping[str, Any], out: Path | None) -> None:
    """Print ``row`` as a line of JSON, and append it to ``out`` if that is a file."""
    line = json.dumps(row)
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


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
    """Versions of installed packages that may matter."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, Any]:
    """Facts of the machine, for every result file."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
    }


def process_tree(pid: int | None = None) -> list[int]:
    """A process and all its descendants. The kernel lists children by thread."""
    found, todo = [], [pid or os.getpid()]
    while todo:
        found.append(one := todo.pop())
        try:
            for thread in Path(f"/proc/{one}/task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
        except OSError:
            continue  # it has ended in the meantime
    return found


def cpu_seconds(pids: list[int], ended: bool = False) -> float:
    """CPU time of those processes so far; ``ended``: and of their children that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11 : 15 if ended else 13]))
    return total / _TICKS


def own_seconds() -> float:
    """CPU time so far of this process and its descendants, ended ones too if their parent waited for them."""
    return cpu_seconds(process_tree(), ended=True)


def busy_seconds() -> float:
    """CPU time of all processes so far."""
    values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(values) - values[3] - values[4] - values[7]) / _TICKS


class OtherProcesses:
    """Measures, during the block, how many cores other processes used.

    Attributes:
        cores: set at the end.
    """

    cores: float = 0.0

    def __enter__(self) -> OtherProcesses:
        self._busy, self._ours, self._began = busy_seconds(), own_seconds(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        others = busy_seconds() - self._busy - (own_seconds() - self._ours)
        self.cores = round(max(0.0, others) / seconds, 2)
