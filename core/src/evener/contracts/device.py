"""The device contract: memory, read-back, streams and events of one accelerator (or the CPU).

Implement ``Device`` in a backend and return it from the hook ``evener_device``. Core reads ``capabilities`` and picks a
path that the device can serve; it never asks for a vendor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """What a device can do; every default is the conservative one.

    Attributes:
        dtypes: compute types with native kernels, by torch's name ("bfloat16").
        emulated: compute types that give right results slowly.
        alignment: bytes to which the state pool's pages are aligned.
        int64: kernels may take int64 tensors; otherwise indices are int32.
        host_lengths: attention wants sequence lengths on the host too.
        graphs: a step can be captured and replayed.
        max_captures: how many captures may live at once; None is no limit.
        graph_update: replays need a parameter update (``Replay.update``) before each run.
        host_memory: tensors live in host memory (the CPU): no copies are needed to read them.
        variant: the chip or instruction set, e.g. "avx512_bf16"; kernels may match it.
        features: further words that kernels may match, e.g. {"vnni"}.
    """

    dtypes: frozenset[str] = frozenset({"float32"})
    emulated: frozenset[str] = frozenset()
    alignment: int = 512
    int64: bool = False
    host_lengths: bool = True
    graphs: bool = False
    max_captures: int | None = None
    graph_update: bool = False
    host_memory: bool = False
    variant: str = ""
    features: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes that can still be allocated, and bytes in all."""

    free: int
    total: int


class Readback(ABC):
    """A copy of a device tensor to the host, under way. Obtained from ``Device.readback``."""

    @abstractmethod
    def ready(self) -> bool:
        """True once ``wait`` would not block."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Block until the copy has arrived and return it: a CPU tensor, same shape and dtype, owned by the caller."""


class ReadyReadback(Readback):
    """A read-back that is complete when it is made; for devices whose tensors live in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def ready(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._tensor


class Device(ABC):
    """One device of a backend.

    Attributes:
        name: what a person calls it, e.g. "AMD EPYC, 2 threads".
        index: its number in the backend's namespace.
        torch_device: where torch puts its tensors.
        capabilities: see ``DeviceCapabilities``.
    """

    name: str
    index: int
    torch_device: torch.device
    capabilities: DeviceCapabilities

    @abstractmethod
    def select(self) -> None:
        """Make this the calling thread's current device. Called once by the thread that runs steps."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all submitted work is done."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Bytes free and total, as this process may use them (a container's limit counts)."""

    @abstractmethod
    def readback(self, tensor: torch.Tensor) -> Readback:
        """Start copying ``tensor`` to the host, after the work submitted so far. ``tensor`` may be overwritten
        afterwards."""

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """(optional) Copy a small host array to the device. Default: a blocking ``Tensor.to``. The array may be reused
        afterwards."""
        import torch

        host = torch.from_numpy(array)
        return host.clone() if self.torch_device.type == "cpu" else host.to(self.torch_device)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """(optional) A large uint8 tensor [nbytes] of zeros, for the state pool. Default: ``torch.zeros``; on host
        memory pages that nobody has touched yet, so that an unused pool costs nothing."""
        import numpy as np
        import torch

        if self.capabilities.host_memory:
            return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def limit_threads(self, count: int) -> None:
        """(optional) Use at most ``count`` host threads for compute. Default: nothing, for devices that compute
        elsewhere."""
        del count

    def new_stream(self) -> Any:
        """(optional) A new stream, usable as a context manager. Default: raises, for devices with one queue."""
        raise NotImplementedError(f"{self.name} has no streams")

    def new_event(self) -> Any:
        """(optional) A new event with ``record()``, ``query()`` and ``synchronize()``. Default: raises."""
        raise NotImplementedError(f"{self.name} has no events")

    def seed(self, seed: int) -> None:
        """(optional) Seed torch's generator of this device (``load=dummy`` uses it). Default: ``torch.manual_seed``."""
        import torch

        torch.manual_seed(seed)

    def host_fallbacks(self) -> int | None:
        """(optional) How many ops have silently run on the host so far; None when the device cannot tell."""
        return None
