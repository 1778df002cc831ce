"""Kernels in CUDA C++ on the host: compiled by g++ behind ``emulator/host.h`` instead of ``hopper.cuh``, and run by
``emulator/runtime.cpp`` with all programs and threads of a launch, which wait for each other as on a card."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import cast

import torch

from evener_backend_cuda.capability import capabilities
from evener_backend_cuda.compiled import CompiledKernel, Driver, Place
from evener_conformance.reference.device import HostDevice

HERE = Path(__file__).parent / "emulator"
#: Functions of a card, which those of host.h stand for.
HOPPER = (files("evener_backend_cuda") / "hopper.cuh").read_text()
_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-w", "-Wl,-z,now", "-Wl,-Bsymbolic")
#: Of a kernel: it ends with a message where a card would, or might, do something else.
_KERNEL_FLAGS = (
    "-O1", "-march=native", "-fno-strict-aliasing", "-fsanitize=alignment,bounds,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error", f"-I{HERE}",
)  # fmt: skip
#: When nobody can go on, each wait gives up at its next look, and says so. ``looks``: as in one_token.cu.
_PATIENCE = "(emulator::stuck?looks:0u)"


def hopper(units: int = 132) -> HostDevice:
    """The host, with the capabilities of a Hopper GPU of so many multiprocessors."""
    device = HostDevice(0)
    device.capabilities = replace(capabilities((9, 0), units, 232_448), host_memory=True)
    return device


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p), ("argument", ctypes.c_void_p), ("programs", ctypes.c_uint),
        ("threads", ctypes.c_uint), ("shared", ctypes.c_uint),
    ]  # fmt: skip


class _Options(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_ulonglong), ("room", ctypes.c_uint), ("overlap", ctypes.c_uint)]


@dataclass
class Schedule:
    """How programs run.

    Attributes:
        seed: of the order of threads, and of the time until copies and messages arrive. 0: in order, and messages
            are there at once.
        room: programs that are there at a time; an H200 has room for two in each of 132 multiprocessors.
        overlap: whether a launch in a graph may start before the one ahead of it has ended.
    """

    seed: int = 0
    room: int = 264
    overlap: bool = True


class EmulatedDriver(Driver):
    """Compiles for the host and launches there.

    Outside of ``graph`` a launch has ended when the call returns. Launches in a graph are run at its end.

    Args:
        folder: keeps what was compiled.
        faults: places of the source, and what stands there with faults that a test plants: ``FAULT(3)`` is true while
            ``planted`` is 3. So one compilation serves all faults.
    """

    def __init__(self, folder: Path, faults: Mapping[str, str] | None = None) -> None:
        super().__init__("host")
        self._folder, self._faults = folder, faults or {}
        self.schedule = Schedule()
        #: Of every launch.
        self.arguments: list[ctypes.Structure] = []
        #: Launches of the graph that is being captured; None: there is none. And how many graphs there were.
        self.captured: list[tuple[EmulatedKernel, ctypes.Structure]] | None = None
        self.graphs = 0
        self._library = self._built("runtime", (HERE / "runtime.cpp").read_text(), ("-O2", f"-I{HERE}"))
        self._runtime = ctypes.CDLL(str(self._library))
        self.planted = 0

    def refusal(self) -> str | None:
        return None

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        assert source.count(HOPPER) == 1
        source = source.replace(HOPPER, '#include "host.h"\n')
        for text, other in self._faults.items():
            assert source.count(text) == 1, f"{source.count(text)} times in the source: {text}"
            source = source.replace(text, other)
        # Threads share the argument, which may be larger than their stacks.
        source = re.sub(r"const __grid_constant__ (\w+) ", r"const \1& ", source)
        for name in re.findall(r"__global__ .*?(\w+)\(const", source):
            source += f'extern "C" void start_{name}(const void* argument) {{ call_kernel({name}, argument); }}\n'
        given = {**defines, **({"PATIENCE": _PATIENCE} if "PATIENCE" in defines else {})}
        flags = (*_KERNEL_FLAGS, *(f"-D{k}={v}" for k, v in given.items()))
        beside = "".join((HERE / name).read_text() for name in ("host.h", "runtime.h"))
        return str(self._built("kernel", source + f"\n// {sha256(beside)}\n", flags, self._library)).encode()

    def kernel(
        self, code: bytes, name: str, grid: int, threads: int, shared: int, early: bool = True
    ) -> CompiledKernel:
        start = ctypes.cast(ctypes.CDLL(code.decode())[f"start_{name}"], ctypes.c_void_p)
        return cast(CompiledKernel, EmulatedKernel(self, start, grid, threads, shared))

    @contextmanager
    def graph(self) -> Iterator[None]:
        """Launches in here are kept, and run at the end."""
        self.captured = kept = list[tuple[EmulatedKernel, ctypes.Structure]]()
        self.graphs += 1
        try:
            yield
        finally:
            self.captured = None
        self.run(kept)

    def run(self, launches: Sequence[tuple[EmulatedKernel, ctypes.Structure]]) -> None:
        """Raises RuntimeError with what went wrong: who waits for what, if nobody can go on."""
        held = (_Launch * len(launches))()
        report = ctypes.c_uint()
        for launch, (kernel, argument) in zip(held, launches, strict=True):
            argument.report = ctypes.addressof(report)
            launch.start, launch.argument = kernel.start, ctypes.addressof(argument)
            launch.programs, launch.threads, launch.shared = kernel.grid, kernel.threads, kernel.shared
        ctypes.c_uint.in_dll(self._runtime, "emulator_planted").value = self.planted
        how, error = self.schedule, ctypes.create_string_buffer(4096)
        options = _Options(how.seed, how.room, how.overlap)
        if self._runtime.emulator_run(held, len(held), ctypes.byref(options), error, len(error)):
            raise RuntimeError(error.value.decode())

    def _built(self, name: str, source: str, flags: Sequence[str], *libraries: Path) -> Path:
        library = self._folder / f"{name}-{sha256(repr((source, flags, libraries)))}.so"
        if not library.exists():
            made = library.with_suffix(".cpp")
            made.write_text(source)
            subprocess.run([os.environ.get("CXX", "g++"), *_FLAGS, *flags, "-o", library, made, *libraries], check=True)
        return library


class EmulatedKernel:
    """Stands for a loaded kernel."""

    def __init__(self, driver: EmulatedDriver, start: ctypes.c_void_p, grid: int, threads: int, shared: int) -> None:
        self._driver, self.start, self.grid, self.threads, self.shared = driver, start, grid, threads, shared

    def place(self, device: torch.device) -> Place:
        """In a graph, each launch waits for the one before."""
        captured = self._driver.captured
        return Place(7) if captured is None else Place(7, self._driver.graphs, (len(captured),))

    def __call__(self, stream: int, argument: ctypes.Structure) -> None:
        assert stream == 7
        launch = self, type(argument).from_buffer_copy(argument)
        self._driver.arguments.append(launch[1])
        if self._driver.captured is None:
            self._driver.run([launch])
        else:
            self._driver.captured.append(launch)

    def change(self, place: Place, argument: ctypes.Structure) -> bool:
        """The last launch of the graph gets another argument."""
        captured = self._driver.captured
        assert captured is not None and place.nodes == (len(captured),) and captured[-1][0] is self
        captured[-1] = self, type(argument).from_buffer_copy(argument)
        self._driver.arguments[-1] = captured[-1][1]
        return True
