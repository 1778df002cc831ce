"""Compile the kernels for levels of x86-64 into the wheel, if ``EVENER_CPU_LEVELS`` asks for it.

    EVENER_CPU_LEVELS=all pip wheel ./backends/cpu        # or some of them: v4-amx,v4-bf16,v4-vnni,v4,v3

Without it the wheel has sources only and runs everywhere: the first start compiles them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "src/evener_backend_cpu"
VARIABLE = "EVENER_CPU_LEVELS"


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """Puts a library for each level that was asked for into ``evener_backend_cpu/built``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get(VARIABLE, "")
        if not wanted or version == "editable":
            return
        if sysconfig.get_platform() != "linux-x86_64":
            raise SystemExit(f"{VARIABLE} is for Linux on x86-64, this is {sysconfig.get_platform()}: leave it out")
        self._folder = tempfile.TemporaryDirectory()
        for path in build(wanted, Path(self._folder.name)):
            build_data["force_include"][str(path)] = f"evener_backend_cpu/built/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def build(wanted: str, out: Path) -> list[Path]:
    """Compile the levels ``wanted`` ("all", or names with commas) into the folder ``out``.

    Raises:
        SystemExit: a name is no level, or a compiler refuses.
    """
    levels = _levels()
    known = {level.name: level for level in levels.LEVELS}
    names = list(known) if wanted == "all" else wanted.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{VARIABLE}={wanted}: no level {unknown[0]!r}; type all, or some of {','.join(known)}")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda name: _compile(levels, known[name], out), names))


def _levels() -> ModuleType:
    """``levels.py`` by its path: importing its package would import evener, which a build does not have."""
    spec = importlib.util.spec_from_file_location("evener_cpu_levels", PACKAGE / "levels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _compile(levels: ModuleType, level: Any, out: Path) -> Path:
    sources, made = PACKAGE / "native", out / f"{level.name}.so"
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, str(sources / "kernels.cpp"), *level.flags, *levels.FLAGS, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{compiler} could not compile the kernels for {level.name}:\n{done.stderr[-2000:]}")
    named = out / levels.file_name(level, sources, made.read_bytes())
    made.rename(named)
    return named
