"""Every kernel under AddressSanitizer: nothing outside of a tensor is touched, and wrong arguments are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.backend.native_code import compile_library
from evener_backend_cpu.isa import LIMITS, VARIABLE
from evener_backend_cpu.native_library import SOURCES, compile_flags

HERE = Path(__file__).parent
SANITIZER = ("libasan.so", "libstdc++.so.6")  # without the second, the first cannot follow torch's exceptions
#: Random cases, each of all kernels; they take under a minute.
CASES = 40


@pytest.fixture(scope="module")
def library() -> Path:
    """The kernels with AddressSanitizer, compiled into a folder of their own in about a minute, once; for the level of
    ``EVENER_CPU_ISA``, if it names one."""
    level = LIMITS.get(os.environ.get(VARIABLE, "auto"))
    flags = ["-O1" if flag == "-O3" else flag for flag in compile_flags(level)]
    made = compile_library(
        SOURCES / "kernels.cpp", (*flags, "-g1", "-fsanitize=address"), "cpu-kernels-sanitized", "kernels to be fuzzed",
        compiler="g++",
    )  # fmt: skip
    assert isinstance(made, Path), made
    return made


def fuzz(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    preload = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in SANITIZER]
    environ = {
        **os.environ, "LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "kernel_fuzzer.py"), str(library), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_no_kernel_touches_what_it_was_not_given(library: Path) -> None:
    done = fuzz(library, "--count", str(CASES))
    last = [line for line in done.stdout.splitlines() if line.startswith("case")][-1:]
    assert done.returncode == 0, f"{last}\n{done.stderr[-6000:]}"
    assert "'refused': " in done.stdout and "'valid': " in done.stdout


@pytest.mark.slow
def test_a_read_outside_of_a_tensor_is_seen(library: Path) -> None:
    done = fuzz(library, "--outside")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr and "evener_greedy_f32" in done.stderr
