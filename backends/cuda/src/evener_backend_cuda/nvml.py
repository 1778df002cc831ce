"""NVML, the driver's management library, through ctypes: lists the GPUs without a CUDA context. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


class NvmlError(Exception):
    """NVML is missing, or a call failed."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``capability`` is (major, minor); ``memory`` in bytes; ``pci``: its bus address, in lower case."""

    name: str
    uuid: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The driver's version and all GPUs in its order; visibility variables do not matter."""

    driver: str
    gpus: tuple[Gpu, ...]


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read(library: str = _LIBRARY) -> Machine:
    """Ask the driver.

    Raises:
        NvmlError: the library is missing or a call failed; with its message.
    """
    with _opened(library) as nvml:
        driver = ctypes.create_string_buffer(_NAME_BYTES)
        _call(nvml, "nvmlSystemGetDriverVersion", driver, _NAME_BYTES)
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        return Machine(driver.value.decode(), tuple(_gpu(nvml, index) for index in range(count.value)))


@contextmanager
def _opened(library: str) -> Iterator[ctypes.CDLL]:
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise NvmlError(f"{library} cannot be loaded: {error}") from error
    _call(nvml, "nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
    name, uuid = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_NAME_BYTES)
    _call(nvml, "nvmlDeviceGetName", handle, name, _NAME_BYTES)
    _call(nvml, "nvmlDeviceGetUUID", handle, uuid, _NAME_BYTES)
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name.value.decode(), uuid.value.decode(), memory.total, (major.value, minor.value))


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(nvml, function)(*arguments)
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise NvmlError(f"{function}: {nvml.nvmlErrorString(code).decode()}")
