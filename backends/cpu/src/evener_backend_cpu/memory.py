"""Memory that this process may use: the machine's, or less where a cgroup (a container) or ``ulimit -v`` sets a limit.
Torch-free."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def free_and_total(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) in bytes. ``root`` holds ``proc`` and ``sys``; page cache that can be dropped counts as free."""
    total, free = _machine(root / "proc/meminfo")
    for limit, used in [*_limits(root), *_address_space(root / "proc/self/statm")]:
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free, total


def _address_space(statm: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of this process's address space (``ulimit -v``), if it is limited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and statm.exists():
        yield limit, int(statm.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _machine(meminfo: Path) -> tuple[int, int]:
    if not meminfo.exists():
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size, pages * size
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)

    def amount(key: str) -> int:
        return int(fields[key].split()[0]) * 1024

    return amount("MemTotal"), amount("MemAvailable" if "MemAvailable" in fields else "MemFree")


def _limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of this process's cgroups and all their parents, of cgroup version 2 and 1."""
    found: list[tuple[int, int]] = []
    own = root / "proc/self/cgroup"
    if not own.exists():
        return found
    for line in own.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place == base.parent:
                break
            pair = _limit(place, *names)
            if pair is not None:
                found.append(pair)
    return found


def _limit(folder: Path, limit_name: str, used_name: str, cache_name: str) -> tuple[int, int] | None:
    limit_file, used_file = folder / limit_name, folder / used_name
    if not (limit_file.exists() and used_file.exists()):
        return None
    text = limit_file.read_text(encoding="ascii").strip()
    if text == "max":
        return None
    used = int(used_file.read_text(encoding="ascii"))
    stat = folder / "memory.stat"
    if stat.exists():
        for line in stat.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == cache_name:
                used -= min(used, int(value))
    return int(text), used
