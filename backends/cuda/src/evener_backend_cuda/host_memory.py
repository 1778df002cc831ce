"""Page-locked memory that the device's kernels read where it is, and words in it that a stream waits for."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from evener_backend_cuda.many_copies import open_driver

#: ``CU_STREAM_WAIT_VALUE_GEQ``: until the word is the number or more.
_AT_LEAST = 0


class _Bytes:
    """How torch is told of memory: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # torch keeps this object as long as its tensor
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip


def mapped(host: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Page-locked ``host``, contiguous, as a tensor of the device. Host and device have one address for it."""
    found: torch.Tensor = torch.as_tensor(_Bytes(host), device=where)
    return found.view(host.dtype).view(host.shape)


def await_word(word: torch.Tensor, stream: int, driver: Any = None) -> None:
    """Let the stream wait until ``word``, int32 [1] in page-locked memory, is more than 0.

    Raises:
        RuntimeError: the driver refused it.
    """
    wait = (driver or open_driver()).cuStreamWaitValue32_v2
    code = wait(ctypes.c_void_p(stream), ctypes.c_uint64(word.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(_AT_LEAST))
    if code:
        raise RuntimeError(f"cuStreamWaitValue32 failed with {code}")
