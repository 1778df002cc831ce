"""The device contract: memory, read-back, streams and events of one accelerator (or the CPU).

Implement ``Device`` in a backend and return it from the hook ``evener_device``. Core reads ``capabilities`` and picks a
path that the device can serve; it never asks for a vendor.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
        alignment: bytes to which core aligns the addresses of the state pool's pages and of a step's arrays
            (``StateStep``, positions, token ids). Views that a layer cuts out of its activations, and columns of
            sampling parameters, begin anywhere and have strides: a kernel that cannot read those copies them.
        int64: kernels may take int64 tensors; otherwise what core hands to kernels and state providers is int32.
        host_lengths: attention wants sequence lengths on the host too; they are the device's, not an upper bound (the
            engine gives them to everybody, so far).
        graphs: a step can be captured and replayed.
        max_captures: how many captures may live at once; None is no limit. A step is two.
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
        simulated: (optional) it stands in for hardware that is not here; what runs on it is evidence of level L3.
    """

    name: str
    index: int
    torch_device: torch.device
    capabilities: DeviceCapabilities
    simulated: bool = False

    @abstractmethod
    def select(self) -> None:
        """Make this the calling thread's current device. Called once by the thread that runs steps."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all submitted work is done."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Bytes free and total, as this process may use them (a container's limit counts).

        Asked before weights are read, and once more after a warm-up step: the state pool gets of ``free`` what is there
        then, so ``free`` must shrink by whatever is allocated meanwhile, through torch or not. Memory that torch keeps
        for itself and would hand out again counts as free. Where it cannot tell (a device that plays in host memory)
        users set ``infer.kv_memory``; the kit wants it to tell unless the device says ``host_memory``.
        """

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

    def locked(self, count: int, nbytes: int) -> Sequence[torch.Tensor]:
        """(optional) ``count`` uint8 CPU tensors [nbytes] of page-locked memory: weights are copied from them while the
        host reads the next, with ``new_event`` behind each copy. Default: none; weights are moved one after another, or
        stay mapped where the device is the host."""
        del count, nbytes
        return ()

    def zeros(self, nbytes: int) -> torch.Tensor:
        """(optional) A large uint8 tensor [nbytes] of zeros at an address that ``alignment`` divides, for the state
        pool; kernels and packings that want aligned memory of their own may ask for it, too, and view it. Default:
        ``torch.zeros``, aligned as torch's allocator for that device aligns (CPU tensors: to less than the default
        ``alignment``); with ``host_memory`` aligned pages that nobody has touched yet, so that an unused pool costs
        nothing."""
        import numpy as np
        import torch

        if self.capabilities.host_memory:
            raw = np.zeros(nbytes + self.capabilities.alignment, dtype=np.uint8)
            return torch.from_numpy(raw)[-raw.ctypes.data % self.capabilities.alignment :][:nbytes]
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

    def measure(self, work: Callable[[], None]) -> float:
        """(optional) Seconds that the device takes for what ``work`` submits, nothing being under way. Default: by the
        host's clock, until all of it is done."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        """(optional) Bytes of the device that ``work`` takes at its peak beyond what was allocated before, nothing else
        being under way; the conformance kit compares them with the memory plan. What an op of yours (a custom op, a
        launch) allocates inside counts as well: a torch dispatch mode sees such an op as one call, and not what it
        allocates. Default: None, and ``work`` is not run: the device does not count."""
        del work
        return None

    def conditions(self) -> Mapping[str, str]:
        """(optional) What measured times depend on beside the device's name and variant: ``{"driver": "580.95"}``,
        threads, a compiler. Of a version, the first two numbers count. Default: nothing."""
        return {}

    def host_fallbacks(self) -> int | None:
        """(optional) How many ops have silently run on the host since the device was opened; None when it cannot
        tell."""
        return None
