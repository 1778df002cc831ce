"""Many copies to the device by one call of the driver: each ``copy_`` of torch takes the host several microseconds, and
experts are many small tensors."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

log = logging.getLogger("evener.worker")
#: ``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: sources are read in the stream's order.
_IN_ORDER = 1
#: Copies of one call. On an H200 with CUDA 13.0, one of 128 copies alone took 0.1 ms; but calls with 100 to 300 copies
#: of 25 KB to 1.6 MB took as long as the copies, 1 and 2 ms (``benchmarks/batch_copies.py``).
MOST = 64
#: Addresses, or numbers of bytes: uint64 [n].
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


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


def together(driver: Any, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> int:
    """One call of the driver, which CUDA 13 has, for all copies; returns its code."""
    how, first = _Attributes(order=_IN_ORDER), ctypes.c_size_t(0)
    lists = (ctypes.c_void_p(each.ctypes.data) for each in (to, sources, sizes))
    return int(driver.cuMemcpyBatchAsync_v2(
        *lists, ctypes.c_size_t(len(to)), ctypes.byref(how), ctypes.byref(first), ctypes.c_size_t(1),
        ctypes.c_void_p(stream),
    ))  # fmt: skip


class ManyCopies:
    """Copies in the way that the driver has.

    Args:
        driver: opens CUDA's library.
    """

    def __init__(self, driver: Callable[[], Any] = open_driver) -> None:
        self._open, self._together = driver, True

    def __call__(self, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Submit the copies of ``sizes`` bytes from addresses of the host to those of the device.

        Raises:
            RuntimeError: the driver refused one.
        """
        driver = self._open()
        if not stream:  # CUDA's default one, which takes no batches
            one_by_one(driver, to, sources, sizes, stream)
            return
        if self._together and hasattr(driver, "cuMemcpyBatchAsync_v2"):
            for begin in range(0, len(to), MOST):
                some = slice(begin, begin + MOST)
                if code := together(driver, to[some], sources[some], sizes[some], stream):
                    break
            else:
                return
            log.warning("cuMemcpyBatchAsync failed with %d; experts are copied by a call for each tensor", code)
        self._together = False
        one_by_one(driver, to, sources, sizes, stream)
