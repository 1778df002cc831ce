"""The devices of ``reference_backend``: a plain one, and one that delays results and raises when they are read early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, Readback, ReadyReadback
from evener.contracts.hooks import hookimpl
from evener.errors import EngineError

_POISON = -0x5A5A5A5
#: Ops through which a step would wait for the device.
_SYNCHRONIZING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class HostDevice(Device):
    """Host memory; every result is ready at once."""

    def __init__(self, index: int) -> None:
        self.name, self.index = "reference host", index
        self.torch_device = torch.device("cpu")
        self.capabilities = DeviceCapabilities(
            dtypes=frozenset({"float32", "bfloat16", "float16"}), alignment=64, int64=True, host_memory=True
        )

    def select(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def memory(self) -> MemoryInfo:
        return MemoryInfo(8 << 30, 8 << 30)

    def readback(self, tensor: torch.Tensor) -> Readback:
        return ReadyReadback(tensor.clone())


class ForbidHostReads(TorchDispatchMode):
    """While active, an op that needs a value on the host raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SYNCHRONIZING:
            raise EngineError(f"{func} reads a value on the host during a step")
        return func(*args, **(kwargs or {}))


class DelayedReadback(Readback):
    """Holds poison until it is waited for; ``ready`` only after the device has been given more work or was waited for."""

    def __init__(self, device: DelayedDevice, tensor: torch.Tensor) -> None:
        self._device, self._value = device, tensor.clone()
        self._born = device.submitted
        self.seen = torch.full_like(tensor, _POISON)
        if tensor.numel():
            tensor.fill_(_POISON)

    def ready(self) -> bool:
        return self._device.submitted > self._born

    def wait(self) -> torch.Tensor:
        if self._device.stepping:
            raise EngineError("a result was read while a step was being submitted")
        self.seen = self._value
        return self.seen


class DelayedDevice(HostDevice):
    """Counts submissions; see ``DelayedReadback``.

    Attributes:
        submitted: uploads so far, which is at least one a step.
        stepping: True while the engine is inside a step.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.submitted = 0
        self.stepping = False

    def upload(self, array: Any) -> torch.Tensor:
        self.submitted += 1
        return super().upload(array)

    def readback(self, tensor: torch.Tensor) -> Readback:
        return DelayedReadback(self, tensor)


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The plain device or, with ``delay``, the asynchronous one."""
    return DelayedDevice(index) if options["delay"] else HostDevice(index)
