"""What a command sets up before it starts an engine in its own process."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from evener_server import local_engine


def test_threads_of_numpys_library_do_not_wait_in_a_loop_unless_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)  # nothing is loaded ahead
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "26")
    local_engine.prepare()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "26"
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT")
    local_engine.prepare()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "4"


def test_glibc_keeps_little_free_memory_until_the_engine_has_started_and_a_c_library_without_this_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []
    library = type("Library", (), {})()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    local_engine._give_back_free_memory()
    local_engine._keep_free_memory(1 << 16, 1 << 17)
    library.malloc_trim = lambda padding: asked.append((padding,))
    library.mallopt = lambda name, value: asked.append((name, value))
    local_engine._give_back_free_memory()
    local_engine._keep_free_memory(1 << 16, 1 << 17)
    assert asked == [(0,), (-1, 1 << 16), (-3, 1 << 17)]
