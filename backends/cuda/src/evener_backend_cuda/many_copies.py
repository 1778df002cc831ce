"""Many copies of page-locked memory to the device. The copy engines take the large ones, from one call of the driver.
Small ones would take the thread that submits about as long as the engines: a kernel reads them from the host's memory
where it is, in one launch, whose argument is the list of copies. Measured by ``benchmarks/batch_copies.py``.
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
#: Programs. So many loads under way keep the bus busy. With more, each read of host memory waits longer, also those by
#: which the device begins other kernels.
PROGRAMS = 4
_VECTOR = 16
#: Bytes of the smallest copy that the engines take. A kernel's are 10% slower, and take multiprocessors from products.
LARGE = 1 << 19
#: ``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: sources are read in the stream's order. Copies of one call: with more, a call
#: could take as long as the copies.
_IN_ORDER, BATCH = 1, 64
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


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


def batches(driver: Any, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> int:
    """Calls of the driver, which CUDA 13 has, for many copies each; returns the code of one that failed, or 0."""
    how, first = _Attributes(order=_IN_ORDER), ctypes.c_size_t(0)
    for begin in range(0, len(to), BATCH):
        some = [each[begin : begin + BATCH] for each in (to, sources, sizes)]
        code = driver.cuMemcpyBatchAsync_v2(
            *(ctypes.c_void_p(each.ctypes.data) for each in some), ctypes.c_size_t(len(some[0])), ctypes.byref(how),
            ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(stream),
        )  # fmt: skip
        if code:
            return int(code)
    return 0


class Copies(ctypes.Structure):
    """``Copies`` of copy_many.cu."""

    _fields_ = (
        ("to", ctypes.c_uint64 * MOST), ("sources", ctypes.c_uint64 * MOST), ("sizes", ctypes.c_uint32 * MOST),
        ("count", ctypes.c_uint32),
    )  # fmt: skip


class ManyCopies:
    """Copies in the ways that the machine has.

    Args:
        kernels: compiles and loads the kernel for the device.
        driver: opens CUDA's library.
        large, programs: bytes of the smallest copy that the copy engines take, and programs of the kernel.
    """

    def __init__(
        self, kernels: Driver, driver: Callable[[], Any] = open_driver, large: int = LARGE, programs: int = PROGRAMS
    ) -> None:
        self._kernels, self._open, self._large, self._programs = kernels, driver, large, programs
        self._launch: CompiledKernel | None = None
        self._compiles = self._batches = True
        self._argument = Copies()
        self._lists = [np.ctypeslib.as_array(getattr(self._argument, name)) for name, _ in Copies._fields_[:3]]

    def __call__(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Submit the copies of ``sizes`` bytes from addresses of page-locked memory to those of the device.

        Raises:
            RuntimeError: the driver refused one.
        """
        large = sizes >= self._large
        if large.any():
            self._by_engines(to[large], sources[large], sizes[large], stream)
        if not large.all():
            self._by_kernel(to[~large], sources[~large], sizes[~large], stream)

    def _by_engines(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        driver = self._open()
        # CUDA's default stream takes no batches.
        if stream and self._batches and hasattr(driver, "cuMemcpyBatchAsync_v2"):
            if not (code := batches(driver, to, sources, sizes, stream)):
                return
            log.warning("cuMemcpyBatchAsync failed with %d; experts are copied by a call for each tensor", code)
            self._batches = False
        one_by_one(driver, to, sources, sizes, stream)

    def _by_kernel(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        whole = not int(np.bitwise_or.reduce(to | sources | sizes)) % _VECTOR
        launch = self._compiled() if whole else None
        if launch is None:
            self._by_engines(to, sources, sizes, stream)
            return
        for begin in range(0, len(to), MOST):
            count = self._argument.count = min(MOST, len(to) - begin)
            for held, given in zip(self._lists, (to, sources, sizes), strict=True):
                held[:count] = given[begin : begin + count]
            launch(stream, self._argument)  # which copies the argument

    def _compiled(self) -> CompiledKernel | None:
        """The kernel; None if there is none."""
        if self._launch is None and self._compiles:
            source = (files("evener_backend_cuda") / "copy_many.cu").read_text()
            try:
                code = self._kernels.compile(source, {"MOST": MOST, "THREADS": THREADS, "UNROLL": UNROLL})
                self._launch = self._kernels.kernel(code, "copy_many", self._programs, THREADS, 0, early=False)
            except (OSError, RuntimeError) as error:
                self._compiles = False
                log.warning("%s; small tensors of experts are copied by calls of the driver, which is slower", error)
        return self._launch
