"""Host memory on machines with several NUMA nodes.

A page of memory is on the node whose processor writes it first. If one thread reads all experts from a file, they are
all on one node, and later only the memory channels of this node are used. Interleaved pages use the channels of all
nodes, and each thread reads equally many bytes from other nodes. Linux calls this policy ``MPOL_INTERLEAVE``
(set_mempolicy(2)); ``numactl --interleave=all`` sets the same policy.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

from evener.errors import ConfigError

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off")
#: Numbers of the system call set_mempolicy, by machine.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_INTERLEAVE = 3


def spread_memory(choice: str, root: Path = Path("/")) -> None:
    """Interleave the pages that this thread, and threads that it starts later, write first. Does nothing with ``off``,
    or on a machine with one node. If the system does not allow it, a warning is logged.

    Args:
        choice: the value of ``offload.numa``.
        root: the folder that has ``proc`` and ``sys``.

    Raises:
        ConfigError: ``choice`` is none of ``CHOICES``.
    """
    if choice not in CHOICES:
        raise ConfigError(f"offload.numa is {choice!r}; type one of {', '.join(CHOICES)}")
    nodes = memory_nodes(root)
    number = _SET_MEMPOLICY.get(platform.machine())
    if choice == "off" or len(nodes) < 2 or number is None:
        return
    error = _set_policy(number, nodes)
    if error:
        logger.warning(
            "experts in host memory lie on one of %d NUMA nodes, whose channels alone are read: interleaving their "
            "pages failed (%s); a container needs the capability SYS_NICE for it, or start evener with "
            "numactl --interleave=all", len(nodes), os.strerror(error),
        )  # fmt: skip
    else:
        logger.info("pages of experts in host memory are interleaved over %d NUMA nodes", len(nodes))


def memory_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """The NUMA nodes whose memory this process may use; empty if the system does not say."""
    file, allowed = root / "sys/devices/system/node/has_memory", ""
    if not file.is_file():
        return ()
    status = root / "proc/self/status"
    for line in status.read_text(encoding="ascii", errors="replace").splitlines() if status.is_file() else ():
        if line.startswith("Mems_allowed_list:"):
            allowed = line.partition(":")[2]
    found = _numbers(file.read_text(encoding="ascii"))
    return tuple(sorted(found & _numbers(allowed) if allowed.strip() else found))


def _numbers(text: str) -> set[int]:
    """The numbers in a list in the kernel's form: 0, 1 and 4 for ``0-1,4``."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _set_policy(number: int, nodes: tuple[int, ...]) -> int:
    """Make the system call. Returns its ``errno``; 0: no error."""
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (max(nodes) // width + 1))()
    for node in nodes:
        mask[node // width] |= 1 << node % width
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel uses one bit less than this argument says.
    done = libc.syscall(number, _INTERLEAVE, mask, ctypes.c_ulong(len(mask) * width + 1))
    return ctypes.get_errno() if done else 0
