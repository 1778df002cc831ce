"""Watching a kernel run: memory that it allocates is poisoned and guarded, and its copies to the host are recorded.

Fallbacks to the host are found in three ways: by this dispatch mode, by torch's profiler (torch's own fallback, below
Python's dispatch, copies with ``_to_cpu``), and by the device's own count.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evener.contracts.device import Device
from evener_conformance.kit.guards import GuardedMemory, poison

_ATEN = torch.ops.aten
_UNINITIALIZED_OPS = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.empty_permuted, _ATEN.new_empty, _ATEN.new_empty_strided,
}  # fmt: skip
#: Ops that return a number to Python.
_HOST_READ_OPS = {_ATEN._local_scalar_dense, _ATEN.item, _ATEN.is_nonzero, _ATEN.equal, _ATEN.allclose}
#: What torch's own fallback calls for each tensor.
_FALLBACK_COPY_OP = "aten::_to_cpu"


class HostCopyMonitor(TorchDispatchMode):
    """While active, new memory is poisoned, in ``memory`` if it is given, and copies from ``device`` to the host are
    counted in ``copies``, with the line that made them."""

    def __init__(self, device: Device, memory: GuardedMemory | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._memory = device.torch_device.type, memory or GuardedMemory(device, guards=False)
        self.copies: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in the reference device: without this torch imports its compiler, only to disable it here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _UNINITIALIZED_OPS:
            return self._memory.empty_like(result, f"memory that it allocates, {list(result.shape)}")
        elif self._kind != "cpu" and self._to_host(packet, args, kwargs, result):
            self.copies[f"{func} at {_caller()}"] += 1
        return result

    def _to_host(self, packet: Any, args: Any, kwargs: Any, result: Any) -> bool:
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        if not any(t.device.type == self._kind for t in given):
            return False
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return packet in _HOST_READ_OPS or any(t.device.type == "cpu" and t.numel() for t in made)


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


class FallbackMonitor:
    """Finds whether kernels of one device fall back to the host, or write outside of their tensors.

    Args:
        guards: see ``GuardedMemory``; without, calls take no more memory than they do in the engine.

    Attributes:
        seen: what was copied → how often.
        memory: makes what kernels are given.
    """

    def __init__(self, device: Device, guards: bool = True) -> None:
        self._device, self.memory = device, GuardedMemory(device, guards)
        self.seen: Counter[str] = Counter()

    @property
    def undetectable(self) -> str | None:
        """Why a fallback would not be seen; None if it would."""
        if self._device.torch_device.type != "cpu" or self._device.host_fallbacks() is not None:
            return None
        return (
            "its tensors are torch's CPU tensors and host_fallbacks() is None, so an op that runs on the host is not "
            "seen; set DeviceCapabilities.host_memory if it is meant to, or count in Device.host_fallbacks"
        )

    @property
    def not_applicable(self) -> str | None:
        """Why there can be no fallback; None if there can."""
        return "its tensors are in host memory" if self._device.capabilities.host_memory else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one call of a kernel."""
        before = self._device.host_fallbacks()
        with HostCopyMonitor(self._device, self.memory) as witness:
            yield
        self.seen += witness.copies
        after = self._device.host_fallbacks()
        if after is not None and before is not None and after > before:
            self.seen["ops that the device counted in host_fallbacks()"] += after - before

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Around one call of a kernel: with torch's profiler, for fallbacks below Python's dispatch, if the device does
        not count by itself."""
        if self._device.torch_device.type == "cpu" or self._device.host_fallbacks() is not None:
            yield
            return
        with torch.autograd.profiler.profile(use_kineto=True) as profile:
            yield
        found = sum(event.name == _FALLBACK_COPY_OP for event in profile.function_events or ())
        if found:
            self.seen["aten::_to_cpu, which torch's fallback to the host calls"] += found

    def lines(self) -> list[str]:
        """What was seen, the most frequent first."""
        return [f"{count} x {what}" for what, count in self.seen.most_common(3)]


def poison_free_memory(device: Device, shapes: Iterable[torch.Tensor]) -> None:
    """Leave poison in freed memory, where an allocator that caches it puts tensors like these."""
    held = [poison(torch.empty(t.shape, dtype=t.dtype, device=device.torch_device)) for t in shapes]
    del held
