"""Kernels that a wheel brings: which library a processor gets, and a wheel that runs without a compiler."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evener.backend.native_code import Unavailable
from evener_backend_cpu import isa, levels, native_library
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.levels import LEVELS, file_name, usable
from evener_backend_cpu.native_library import SOURCES, Native, load

ROOT = Path(__file__).parents[1]
ALL = frozenset[str]().union(*(level.needs for level in LEVELS))


def _put(folder: Path, level: levels.Level, content: bytes, sources: Path = SOURCES) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / file_name(level, sources, content)
    path.write_bytes(content)
    return path


@pytest.fixture
def compiled() -> bytes:
    """A library that this machine can load."""
    native = CpuDevice(0, {"native": "require"}).native
    assert isinstance(native, Native)
    return native.path.read_bytes()


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "compile_library", lambda *how: Unavailable("compiled"))


def test_a_processor_gets_the_best_level_that_it_can_run(tmp_path: Path) -> None:
    paths = [_put(tmp_path, level, level.name.encode()) for level in LEVELS]
    for number, level in enumerate(LEVELS):
        assert list(usable(level.needs, SOURCES, tmp_path)) == paths[number:]
    for word in LEVELS[-1].needs:
        assert list(usable(ALL - {word}, SOURCES, tmp_path)) == []


def test_kernels_of_the_wheel_are_loaded_and_nothing_is_compiled(
    tmp_path: Path, compiled: bytes, not_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _put(tmp_path, LEVELS[-1], compiled)
    monkeypatch.setattr(native_library, "BUILT", tmp_path)
    here = isa.read()
    able = isa.Processor(here.name, here.variant, here.features, LEVELS[-1].needs)
    found = load(able)
    assert isinstance(found, Native) and found.path == path
    assert load(isa.Processor(here.name, here.variant, here.features)) == Unavailable("compiled")


def test_a_compiler_that_is_named_is_used_instead(
    tmp_path: Path, compiled: bytes, not_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tmp_path, LEVELS[-1], compiled)
    monkeypatch.setattr(native_library, "BUILT", tmp_path)
    assert load(isa.Processor("any", "avx2", frozenset(), ALL), sys.executable) == Unavailable("compiled")


def test_a_library_that_the_system_refuses_is_passed_over(
    tmp_path: Path, compiled: bytes, not_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tmp_path, LEVELS[0], b"not a library")
    monkeypatch.setattr(native_library, "BUILT", tmp_path)
    everything = isa.Processor("any", "avx2", frozenset(), ALL)
    assert load(everything) == Unavailable("compiled")
    path = _put(tmp_path, LEVELS[1], compiled)
    found = load(everything)
    assert isinstance(found, Native) and found.path == path


def test_damaged_libraries_and_those_of_other_sources_are_left_out(tmp_path: Path) -> None:
    _put(tmp_path, LEVELS[0], b"whole").write_bytes(b"half")
    other = tmp_path / "sources"
    other.mkdir()
    (other / "kernels.cpp").write_text("int evener;")
    _put(tmp_path, LEVELS[0], b"whole", other)
    assert list(usable(ALL, SOURCES, tmp_path)) == []
    path = _put(tmp_path, LEVELS[0], b"whole")
    assert list(usable(ALL, SOURCES, tmp_path)) == [path]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wheel_has_sources_only_unless_levels_are_wanted(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, Any] = {"force_include": {}}
    made = hook.Kernels(str(ROOT), {}, None, None, "", "wheel")
    monkeypatch.delenv("EVENER_CPU_LEVELS", raising=False)
    made.initialize("standard", data)
    monkeypatch.setenv("EVENER_CPU_LEVELS", "all")
    made.initialize("editable", data)
    assert data == {"force_include": {}}


def test_a_level_that_does_not_exist_and_another_machine_are_refused(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="no level 'v5'; type all, or some of v4-amx,v4-bf16,v4-vnni,v4,v3"):
        hook.build("v3,v5", tmp_path)
    monkeypatch.setenv("EVENER_CPU_LEVELS", "all")
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "linux-aarch64")
    with pytest.raises(SystemExit, match="linux-aarch64: leave it out"):
        hook.Kernels(str(ROOT), {}, None, None, "", "wheel").initialize("standard", {"force_include": {}})


def test_the_compilers_messages_are_shown(hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'x.h:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(SystemExit, match="no such header"):
        hook.build("v3", tmp_path)


_RUN = """
import torch
from evener_backend_cpu import native_library
from evener_backend_cpu.device import CpuDevice
device = CpuDevice(0, {"native": "require"})
assert device.native.path.parent == native_library.BUILT, device.native.path
print(device.native.path.name)
"""


@pytest.mark.slow
@pytest.mark.skipif(sysconfig.get_platform() != "linux-x86_64", reason="wheels carry libraries for x86-64 on Linux")
def test_a_wheel_with_kernels_runs_where_no_compiler_is(tmp_path: Path) -> None:
    best = next(level for level in LEVELS if level.needs <= isa.read().words)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(ROOT)], check=True, env={**os.environ, "EVENER_CPU_LEVELS": best.name})
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = {"PATH": str(empty), "XDG_CACHE_HOME": str(empty), "HOME": str(empty)}
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r})\n{_RUN}"
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{best.name}-")
    assert not list(empty.rglob("*.so")) and shutil.which("g++", path=str(empty)) is None
