"""Torch's libraries are loaded ahead of its import, and missing or broken ones are left to that import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from evener_server.torch_libraries import load_ahead

LOADED = """
import sys
from evener_server.torch_libraries import load_ahead
thread = load_ahead()
thread.join()
print("torch" in sys.modules, "/libtorch_cpu.so" in open("/proc/self/maps").read())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc/self/maps")
def test_libraries_are_in_memory_before_torch_is_imported() -> None:
    said = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True"]


WAITING = """
#include <unistd.h>
__attribute__((constructor)) static void wait(void) {
    char sign = 'i';
    if (write(INSIDE, &sign, 1) != 1 || read(GO_ON, &sign, 1) != 1) _exit(3);
}
"""


WAITED_FOR = """
import importlib.util, os, sys
from importlib.machinery import ModuleSpec
from evener_server.torch_libraries import load_ahead
torch = ModuleSpec("torch", None, is_package=True)
torch.submodule_search_locations = [sys.argv[1]]
importlib.util.find_spec = lambda name: torch
thread = load_ahead()
for _ in range(2):
    os.read(int(sys.argv[2]), 1)
    os.write(int(sys.argv[3]), b"g")
thread.join()
"""


def test_python_goes_on_meanwhile(tmp_path: Path) -> None:
    """Libraries that wait for a sign while they are loaded get it from the thread that went on."""
    (inside, say_inside), (go_on, say_go_on) = os.pipe(), os.pipe()
    (tmp_path / "lib").mkdir()
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so"):
        made = tmp_path / "lib" / name
        flags = ["-x", "c", "-shared", "-fPIC", f"-DINSIDE={say_inside}", f"-DGO_ON={go_on}"]
        subprocess.run(["g++", *flags, "-o", made, "-"], input=WAITING.encode(), check=True)
    pipes = inside, say_inside, go_on, say_go_on
    command = [sys.executable, "-c", WAITED_FOR, str(tmp_path), str(inside), str(say_go_on)]
    subprocess.run(command, check=True, timeout=60, pass_fds=pipes)
    for each in pipes:
        os.close(each)


def torch_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``import torch`` would find it in ``folder``, and has not yet."""
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_nothing_is_loaded_for_torch_whose_libraries_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_in(tmp_path, monkeypatch)
    assert load_ahead() is None


def test_a_library_that_cannot_be_loaded_is_left_to_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so"):
        (tmp_path / "lib" / name).write_text("no library")
    torch_in(tmp_path, monkeypatch)
    raised: list[object] = []
    monkeypatch.setattr("threading.excepthook", raised.append)
    thread = load_ahead()
    assert thread is not None
    thread.join()
    assert raised == []


def test_nothing_is_loaded_once_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert load_ahead() is None
