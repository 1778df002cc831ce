"""Many copies of page-locked memory to the device: by one launch of a kernel, which reads the host's memory where it
is.

The driver's calls hold up the thread that submits (docs/lab/hybrid.md): one for each copy takes microseconds, and one
for all of them often as long as the copies. A launch takes some microseconds, and its argument is the list of copies.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np

from evener_backend_cuda.compiled import CompiledKernel, Driver

log = logging.getLogger("evener.worker")
#: As in copy_many.cu: copies of a launch, whose argument may have 4 KB.
MOST, THREADS, UNROLL = 200, 512, 4
#: Programs. So many loads under way keep the bus busy; most multiprocessors are left to products.
PROGRAMS = 16
_VECTOR, _MOST_BYTES = 16, (1 << 32) - 1
#: Addresses, or numbers of bytes: uint64 [n].
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


@cache
def open_driver() -> ctypes.CDLL:
    """CUDA's library."""
    return ctypes.CDLL("libcuda.so.1")


def one_by_one(driver: Any, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
    """A call of the driver for each copy."""
    for target, source, size in zip(to.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        code = driver.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        if code:
            raise RuntimeError(f"cuMemcpyHtoDAsync failed with {code} for {size} bytes")


class Copies(ctypes.Structure):
    """``Copies`` of copy_many.cu."""

    _fields_ = (
        ("to", ctypes.c_uint64 * MOST), ("sources", ctypes.c_uint64 * MOST), ("sizes", ctypes.c_uint32 * MOST),
        ("count", ctypes.c_uint32),
    )  # fmt: skip


class ManyCopies:
    """Copies by the kernel, which is compiled when it is first needed; by the driver where it cannot be compiled, or
    where a copy does not begin and end at multiples of 16 bytes.

    Args:
        kernels: compiles and loads the kernel for the device.
        driver: opens CUDA's library.
    """

    def __init__(self, kernels: Driver, driver: Callable[[], Any] = open_driver, programs: int = PROGRAMS) -> None:
        self._kernels, self._open, self._programs = kernels, driver, programs
        self._launch: CompiledKernel | None = None
        self._refused = False
        self._argument = Copies()
        self._lists = [np.ctypeslib.as_array(getattr(self._argument, name)) for name, _ in Copies._fields_[:3]]

    def __call__(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Submit the copies of ``sizes`` bytes from addresses of page-locked memory to those of the device.

        Raises:
            RuntimeError: the driver refused one.
        """
        launch = self._compiled() if _in_vectors(to, sources, sizes) else None
        if launch is None:
            one_by_one(self._open(), to, sources, sizes, stream)
            return
        for begin in range(0, len(to), MOST):
            count = self._argument.count = min(MOST, len(to) - begin)
            for held, given in zip(self._lists, (to, sources, sizes), strict=True):
                held[:count] = given[begin : begin + count]
            launch(stream, self._argument)  # which copies the argument

    def _compiled(self) -> CompiledKernel | None:
        """The kernel; None if there is none."""
        if self._launch is None and not self._refused:
            source = (files("evener_backend_cuda") / "copy_many.cu").read_text()
            try:
                code = self._kernels.compile(source, {"MOST": MOST, "THREADS": THREADS, "UNROLL": UNROLL})
                self._launch = self._kernels.kernel(code, "copy_many", self._programs, THREADS, 0, early=False)
            except (OSError, RuntimeError) as error:
                self._refused = True
                log.warning("%s; experts are copied by a call of the driver for each tensor, which is slower", error)
        return self._launch


def _in_vectors(to: Numbers, sources: Numbers, sizes: Numbers) -> bool:
    """Whether all begin and end where the kernel can copy them."""
    together = np.bitwise_or.reduce(to | sources | sizes)
    return not int(together) % _VECTOR and int(sizes.max(initial=0)) <= _MOST_BYTES
