"""Torch's libraries are loaded ahead of its import, and missing or broken ones are left to that import."""

from __future__ import annotations

import importlib.util
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


WAITED = """
import time
from evener_server.torch_libraries import load_ahead
begin = before = time.perf_counter()
thread, longest = load_ahead(), 0.0
while thread.is_alive():
    now = time.perf_counter()
    longest, before = max(longest, now - before), now
print(longest, time.perf_counter() - begin)
"""


def test_python_goes_on_meanwhile() -> None:
    said = subprocess.run([sys.executable, "-c", WAITED], check=True, capture_output=True, text=True)
    longest, whole = map(float, said.stdout.split())
    assert 0 < longest < whole / 2


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
