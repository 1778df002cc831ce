"""Pages of experts on machines with several NUMA nodes."""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import threading
from pathlib import Path

import pytest

from evener.errors import ConfigError
from evener_offload import numa

#: Numbers of get_mempolicy.
GET = {"x86_64": 239, "aarch64": 236}


def machine(root: Path, nodes: str, allowed: str | None = None) -> Path:
    """A machine's ``sys`` and ``proc``."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "has_memory").write_text(nodes + "\n")
    (root / "proc/self").mkdir(parents=True)
    line = "" if allowed is None else f"Mems_allowed_list:\t{allowed}\n"
    (root / "proc/self/status").write_text("Name:\tevener\n" + line)
    return root


@pytest.mark.parametrize(
    "nodes, allowed, found",
    [
        ("0", "0", (0,)),
        ("0-1", "0-1", (0, 1)),
        ("0-2,5", "1-7", (1, 2, 5)),
        ("0-3", None, (0, 1, 2, 3)),
        ("0-1", "0", (0,)),
    ],
)
def test_nodes_are_those_with_memory_that_the_process_may_use(
    nodes: str, allowed: str | None, found: tuple[int, ...], tmp_path: Path
) -> None:
    assert numa.memory_nodes(machine(tmp_path, nodes, allowed)) == found
    assert numa.memory_nodes(tmp_path / "elsewhere") == ()


def test_pages_are_interleaved_on_several_nodes_only_and_if_it_is_not_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(numa, "_set_policy", lambda number, nodes: calls.append(nodes) or 0)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    one, two = machine(tmp_path / "one", "0"), machine(tmp_path / "two", "0-1", "0-1")
    numa.spread_memory("auto", one)
    numa.spread_memory("off", two)
    assert not calls
    numa.spread_memory("auto", two)
    assert calls == [(0, 1)]
    with pytest.raises(ConfigError, match="type one of auto, off"):
        numa.spread_memory("yes", two)


def test_a_system_that_forbids_it_is_told_of_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numa, "_set_policy", lambda number, nodes: errno.EPERM)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with caplog.at_level(logging.WARNING):
        numa.spread_memory("auto", machine(tmp_path, "0-1"))
    assert "Operation not permitted" in caplog.text and "numactl --interleave=all" in caplog.text


@pytest.mark.skipif(platform.machine() not in GET, reason="the numbers of this machine's system calls are not known")
def test_the_kernel_has_the_policy_for_the_thread_and_those_that_it_starts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    nodes = numa.memory_nodes() or (0,)
    seen: list[tuple[int, int]] = []

    def read() -> None:
        mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
        failed = libc.syscall(GET[platform.machine()], ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, 0)
        seen.append((errno.EPERM if failed else mode.value, mask[0]))

    def run() -> None:
        read()
        error = numa._set_policy(numa._SET_MEMPOLICY[platform.machine()], nodes)
        read()
        child = threading.Thread(target=read)
        child.start()
        child.join()
        errors.append(error)

    errors: list[int] = []
    thread = threading.Thread(target=run)  # the policy ends with it
    thread.start()
    thread.join()
    if errors == [errno.ENOSYS] or errors == [errno.EPERM]:
        assert seen[1] == seen[0]  # a sandbox without these calls, or a container
        return
    wanted = sum(1 << node for node in nodes)
    assert errors == [0] and seen[1] == (3, wanted) == seen[2]
