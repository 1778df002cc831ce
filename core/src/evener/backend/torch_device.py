"""A device that torch has a namespace for (``torch.<namespace>``): memory, copies, streams and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, Readback
from evener.errors import BackendError


class EventReadback(Readback):
    """An asynchronous copy into page-locked memory, and the event that is recorded after it."""

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = event
        event.record()

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> torch.Tensor:
        self._event.synchronize()
        return self._host


class TorchDevice(Device):
    """Device ``index`` of a torch namespace. ``module`` is the namespace's module, see ``torch.get_device_module``.

    Raises:
        BackendError: torch sees no device with this index.
    """

    def __init__(self, namespace: str, index: int, capabilities: DeviceCapabilities) -> None:
        self.module: Any = torch.get_device_module(namespace)
        count = self.module.device_count() if self.module.is_available() else 0
        if index >= count:
            raise BackendError(f"torch sees {count} devices of {namespace}, so not {index}; type `evener doctor`")
        self.index, self.torch_device = index, torch.device(namespace, index)
        self.name, self.capabilities = str(self.module.get_device_name(index)), capabilities

    def select(self) -> None:
        self.module.set_device(self.index)

    def synchronize(self) -> None:
        self.module.synchronize(self.index)

    def memory(self) -> MemoryInfo:
        free, total = self.module.mem_get_info(self.index)
        # Memory that torch's allocator caches without using it counts as free.
        held = self.module.memory_reserved(self.index) - self.module.memory_allocated(self.index)
        return MemoryInfo(free + held, total)

    def readback(self, tensor: torch.Tensor) -> Readback:
        return EventReadback(tensor, self.module.Event())

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        # From page-locked memory the copy is asynchronous. torch keeps that memory alive until the copy is done. numpy
        # fills it: torch would start its threads for a few hundred kilobytes, which takes longer than the copy.
        host = torch.empty_like(torch.from_numpy(array), pin_memory=True)
        host.numpy()[...] = array
        return host.to(self.torch_device, non_blocking=True)

    def pinned_buffers(self, count: int, nbytes: int) -> Sequence[torch.Tensor]:
        return [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    def new_stream(self) -> Any:
        return self.module.Stream(self.index)

    def new_event(self) -> Any:
        return self.module.Event()

    def measure(self, work: Callable[[], None]) -> float:
        began, ended = (self.module.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        self.module.reset_peak_memory_stats(self.index)
        before = self.module.memory_allocated(self.index)
        work()
        return int(self.module.max_memory_allocated(self.index)) - int(before)

    def seed(self, seed: int) -> None:
        self.module.manual_seed(seed)
