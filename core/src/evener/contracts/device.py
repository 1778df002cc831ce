"""The device contract: memory, copies to the host, streams and events of one accelerator (or the CPU).

Implement ``Device`` in a backend and return it from the hook ``evener_device``. Core reads ``capabilities`` and chooses
what the device can do; it never asks which vendor's device it is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """What a device can do. Every default is conservative.

    Attributes:
        dtypes: compute dtypes with native kernels, by torch's name ("bfloat16").
        emulated: compute dtypes that give correct results slowly.
        alignment: in bytes; core aligns the addresses of the state pool's pages and of a step's arrays (``StateStep``,
            positions, token ids) to it. Views that a layer takes from its activations, and columns of sampling
            parameters, are not aligned and have strides: a kernel that cannot read those must copy them.
        int64: kernels may take int64 tensors; otherwise core gives kernels and state providers int32 only.
        host_lengths: attention needs sequence lengths on the host too, exact and not an upper bound. (Today the engine
            gives them to every provider.)
        graphs: a step can be captured and replayed.
        max_captures: how many captures may exist at once; None: no limit. A step needs one, with masks two.
        graph_update: replays need a parameter update (``Replay.update``) before each run.
        host_memory: tensors are in host memory (the CPU), so the host reads them without a copy.
        host_calls: the host can be called between work of the device (``Device.host_call``).
        variant: the chip or instruction set, e.g. "avx512_bf16"; kernels may check it.
        features: more names that kernels may check, e.g. {"vnni"}.
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
    host_calls: bool = False
    variant: str = ""
    features: frozenset[str] = field(default_factory=frozenset)


class MemoryInfo(NamedTuple):
    """Bytes that can still be allocated, and bytes in total."""

    free: int
    total: int


class Readback(ABC):
    """A copy of a device tensor to the host that has been started. Returned by ``Device.readback``."""

    @abstractmethod
    def ready(self) -> bool:
        """True once ``wait`` would not block."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Block until the copy is complete and return it: a CPU tensor, same shape and dtype, owned by the caller."""


class ReadyReadback(Readback):
    """A read-back that is complete from the start; for devices whose tensors are in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def ready(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._tensor


class Device(ABC):
    """One device of a backend.

    Attributes:
        name: for people, e.g. "AMD EPYC, 2 threads".
        index: its number among the backend's devices.
        torch_device: the torch device of its tensors.
        capabilities: see ``DeviceCapabilities``.
        simulated: (optional) it simulates hardware that is not present; results on it are evidence of level L3.
    """

    name: str
    index: int
    torch_device: torch.device
    capabilities: DeviceCapabilities
    simulated: bool = False

    @abstractmethod
    def select(self) -> None:
        """Make it the current device of the calling thread. Called once by the thread that runs steps."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all submitted work is done."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Free and total bytes that this process may use (a container's limit counts).

        Called before weights are read, and again after a warm-up step. The size of the state pool follows from ``free``
        of the second call, so ``free`` must shrink by everything that was allocated in between, through torch or not.
        Memory that torch caches and would use again counts as free. If the device cannot measure it (one that is
        simulated in host memory), users set ``infer.kv_memory``; the conformance kit accepts that only with
        ``host_memory``.
        """

    @abstractmethod
    def readback(self, tensor: torch.Tensor) -> Readback:
        """Start copying ``tensor`` to the host, after the work submitted so far. Work that is submitted later may
        overwrite ``tensor``."""

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """(optional) Copy a small host array to the device. The caller may reuse the array when it returns. Default: a
        blocking ``Tensor.to``."""
        import torch

        return torch.from_numpy(array).to(self.torch_device, copy=True)

    def pinned_buffers(self, count: int, nbytes: int) -> Sequence[torch.Tensor]:
        """(optional) ``count`` uint8 CPU tensors [nbytes] in page-locked memory. The loader copies weights from them
        while the host reads the next ones, and records a ``new_event`` after each copy. Default: none; weights are
        copied one after another, or stay memory-mapped if the device is the host."""
        del count, nbytes
        return ()

    def zeros(self, nbytes: int) -> torch.Tensor:
        """(optional) A large uint8 tensor [nbytes] of zeros, aligned to ``alignment``, for the state pool. Kernels and
        packings that need aligned memory may call it too. Default: ``torch.zeros``, with the alignment of torch's
        allocator for that device (for CPU tensors less than the default ``alignment``); with ``host_memory`` aligned
        pages that the system allocates on first use, so that an unused pool costs nothing."""
        import numpy as np
        import torch

        if self.capabilities.host_memory:
            raw = np.zeros(nbytes + self.capabilities.alignment, dtype=np.uint8)
            return torch.from_numpy(raw)[-raw.ctypes.data % self.capabilities.alignment :][:nbytes]
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def limit_threads(self, count: int) -> None:
        """(optional) Use at most ``count`` host threads for compute. Default: nothing, for devices that do not compute
        on the host."""
        del count

    def new_stream(self) -> Any:
        """(optional) A new stream, usable as a context manager. Default: raises ``NotImplementedError``, for devices
        with one queue."""
        raise NotImplementedError(f"{self.name} has no streams")

    def new_event(self) -> Any:
        """(optional) A new event with ``record()``, ``query()``, ``synchronize()`` and ``wait()``: the current stream
        waits for it. Default: raises ``NotImplementedError``."""
        raise NotImplementedError(f"{self.name} has no events")

    def host_call(self, work: Callable[[], None]) -> None:
        """(optional, with ``capabilities.host_calls``) Submit a function that the host runs, in a thread of the
        driver, when the work before it on the current stream is done; the work after it waits for it. It may be
        captured: then each replay calls it. ``work`` must not raise and must not use the device. The caller keeps it
        alive as long as it may run. Default: raises ``NotImplementedError``."""
        raise NotImplementedError(f"{self.name} does not call the host (DeviceCapabilities.host_calls)")

    def seed(self, seed: int) -> None:
        """(optional) Seed torch's random generator of this device; ``load=dummy`` uses it. Default:
        ``torch.manual_seed``."""
        import torch

        torch.manual_seed(seed)

    def measure(self, work: Callable[[], None]) -> float:
        """(optional) Seconds that the device needs for what ``work`` submits; nothing else is running. Default:
        measured with the host's clock, until all of it is done."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def peak_memory(self, work: Callable[[], object]) -> int | None:
        """(optional) Run ``work`` and return its peak device memory in bytes, beyond what was allocated before; nothing
        else is running. The conformance kit compares it with the memory plan. Memory that your own ops (a custom op, a
        launch) allocate inside must count too; a torch dispatch mode does not see it. Default: None, ``work`` is not
        run, and the device cannot measure."""
        del work
        return None

    def conditions(self) -> Mapping[str, str]:
        """(optional) What measured times depend on besides the device's name and variant: a driver's version
        (``{"driver": "580.95"}``), threads, a compiler. Only the first two numbers of a version are compared. Default:
        nothing."""
        return {}

    def host_fallbacks(self) -> int | None:
        """(optional) How many ops silently fell back to the host since the device was opened; None if it cannot
        count them. Default: None."""
        return None
