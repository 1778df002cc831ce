"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_SYS_CPU = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(
    cpus: frozenset[int] | None = None, sys_cpu: Path = _SYS_CPU, cgroup: Path = _CGROUP
) -> tuple[int, str]:
    """How many physical cores this process may use, and why: the cores in the affinity mask (hardware threads of one
    core count once), but no more than the container's CPU quota.

    Args:
        cpus: logical CPUs; default: this process's affinity mask.
        sys_cpu: folder in which the kernel lists CPUs.
        cgroup: folder with the container's limits.
    """
    cpus = frozenset(os.sched_getaffinity(0)) if cpus is None else cpus
    cores = len({_siblings(sys_cpu, cpu) for cpu in cpus})
    reason = f"{cores} physical cores among the {len(cpus)} CPUs that this process may use"
    share = _time_share(cgroup)
    if share is not None and share < cores:
        return max(1, share), f"the container's CPU quota is {share} of {reason}"
    return cores, reason


def _siblings(sys_cpu: Path, cpu: int) -> str:
    topology = sys_cpu / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        path = topology / name
        if path.is_file():
            return path.read_text().strip()
    return str(cpu)


def _time_share(cgroup: Path) -> int | None:
    path = cgroup / "cpu.max"
    if not path.is_file():
        return None
    quota, _, period = path.read_text().strip().partition(" ")
    return None if quota == "max" else math.ceil(int(quota) / int(period or 100_000))
