"""The torch device module of the simulated namespace: streams, events and memory."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import torch

from evener_conformance.simulated import NAME
from evener_conformance.simulated.aten import KERNELS


class Namespace:
    """The module that ``torch.get_device_module("simulated")`` gives, over the compiled device.

    Attributes:
        implementation: a description of what computes, for people.
        compiled: False for the Python device, whose tensors are wrappers and whose steps cannot be captured.
    """

    implementation = "compiled"
    compiled = True

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._listing = threading.Lock()
        for name in ("used", "peak", "capacity"):
            getattr(self._library, f"evener_{name}").restype = ctypes.c_int64
        self._library.evener_set_capacity.argtypes = (ctypes.c_int, ctypes.c_int64)
        self._library.evener_set_native.argtypes = (ctypes.c_char_p, ctypes.c_bool)
        self._library.evener_on_host.restype = ctypes.c_char_p
        self._library.evener_reads.restype = ctypes.c_int64
        self._library.evener_refuse_reads.argtypes = (ctypes.c_bool,)
        self._library.evener_refuse_reads.restype = ctypes.c_bool

    # Called by core's ``TorchDevice`` and by torch.

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(self._library.evener_devices())

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, index: int) -> None:
        torch.accelerator.set_device_index(index)

    def get_device_name(self, index: int) -> str:
        return f"simulated chip {index}, {self.implementation}"

    def synchronize(self, index: int | None = None) -> None:
        torch.accelerator.synchronize(index)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        total = int(self._library.evener_capacity(index))
        return total - min(total, self.memory_allocated(index)), total

    def memory_allocated(self, index: int) -> int:
        return int(self._library.evener_used(index))

    def memory_reserved(self, index: int) -> int:
        return self.memory_allocated(index)

    def reset_peak_memory_stats(self, index: int) -> None:
        torch.accelerator.memory.reset_peak_memory_stats(index)

    def max_memory_allocated(self, index: int) -> int:
        return int(self._library.evener_peak(index))

    def Stream(self, index: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, index))

    def Event(self) -> torch.Event:
        return torch.Event(NAME, enable_timing=True)

    def stream(self, stream: torch.Stream) -> Any:
        return stream

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Called by ``torch.manual_seed``; nothing to do, as random numbers come from the host's generator."""

    # Only the simulation has these.

    def set_memory(self, index: int, nbytes: int) -> None:
        """Limit the device's memory to ``nbytes``."""
        self._library.evener_set_capacity(index, nbytes)

    def set_missing(self, missing: str) -> None:
        """What happens to torch ops that are not in ``aten.KERNELS``: ``count``, ``refuse`` or ``none``."""
        names = None if missing == "none" else "\n".join(sorted(KERNELS)).encode()
        self._library.evener_set_native(names, missing == "refuse")

    def on_host(self) -> dict[str, int]:
        """How often each torch op ran on the host because the chip has no kernel for it."""
        with self._listing:  # the library's text is valid until the next call, which another rank may make
            lines = self._library.evener_on_host().decode().splitlines()
        return {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}

    def reads(self) -> int:
        """How often a value of the device was read on the host."""
        return int(self._library.evener_reads())

    def refuse_reads(self, refuse: bool) -> bool:
        """Make such a read in this thread an error, or allow it again; returns the previous setting."""
        return bool(self._library.evener_refuse_reads(refuse))

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as a CPU tensor, for kernels to compute with."""
        return torch.ops.evener_simulated.host(tensor)  # type: ignore[no-any-return]
