"""Watching a kernel at work: memory that it does not write holds poison, and its copies to the host are noted.

Whether an op falls back to the host is seen in three ways: by this dispatch mode, by torch's profiler (a fallback that
torch itself makes, below the dispatch of Python, copies with ``_to_cpu``), and by the device's own count.
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

_ATEN = torch.ops.aten
_EMPTY = {
    _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.empty_permuted, _ATEN.new_empty, _ATEN.new_empty_strided,
}  # fmt: skip
#: Ops that give a number to Python.
_READING = {_ATEN._local_scalar_dense, _ATEN.item, _ATEN.is_nonzero, _ATEN.equal, _ATEN.allclose}
#: What torch's own fallback calls for each tensor.
_BOXED = "aten::_to_cpu"


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with a large negative number where there is none."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.is_complex():
        return tensor
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(0xA5 if tensor.dtype == torch.uint8 else -(torch.iinfo(tensor.dtype).max // 3))


class Witness(TorchDispatchMode):
    """While active, new memory is poisoned and copies from ``device`` to the host are counted in ``copies``, with the
    line that made them."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.torch_device.type
        self.copies: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in the reference device: torch would import its compiler to keep it out of here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _EMPTY:
            poison(result)
        elif self._kind != "cpu" and self._to_host(packet, args, kwargs, result):
            self.copies[f"{func} at {_caller()}"] += 1
        return result

    def _to_host(self, packet: Any, args: Any, kwargs: Any, result: Any) -> bool:
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        if not any(t.device.type == self._kind for t in given):
            return False
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return packet in _READING or any(t.device.type == "cpu" and t.numel() for t in made)


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


class HostWatch:
    """Whether kernels of one device fall back to the host.

    Attributes:
        seen: what was copied, and how often.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.seen: Counter[str] = Counter()

    @property
    def blind(self) -> str | None:
        """Why a fallback could not be seen; None if it could."""
        if self._device.torch_device.type != "cpu" or self._device.host_fallbacks() is not None:
            return None
        return (
            "its tensors are torch's CPU tensors and host_fallbacks() says None, so nobody sees whether an op ran on "
            "the host; set DeviceCapabilities.host_memory if it is meant to, or count in Device.host_fallbacks"
        )

    @property
    def needless(self) -> str | None:
        """Why there is nothing to see; None if there is."""
        return "its tensors live in host memory" if self._device.capabilities.host_memory else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one call of a kernel."""
        before = self._device.host_fallbacks()
        with Witness(self._device) as witness:
            yield
        self.seen += witness.copies
        after = self._device.host_fallbacks()
        if after is not None and before is not None and after > before:
            self.seen["ops that the device counted in host_fallbacks()"] += after - before

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Around one call of a kernel, with torch's profiler instead, where the device does not count by itself: for
        fallbacks below the dispatch of Python."""
        if self._device.torch_device.type == "cpu" or self._device.host_fallbacks() is not None:
            yield
            return
        with torch.autograd.profiler.profile(use_kineto=True) as profile:
            yield
        found = sum(event.name == _BOXED for event in profile.function_events or ())
        if found:
            self.seen["aten::_to_cpu, which torch's fallback to the host calls"] += found

    def lines(self) -> list[str]:
        """What was seen, the most frequent first."""
        return [f"{count} x {what}" for what, count in self.seen.most_common(3)]


def spoil(device: Device, shapes: Iterable[torch.Tensor]) -> None:
    """Leave poison where an allocator that keeps freed memory will put tensors like these."""
    held = [poison(torch.empty(t.shape, dtype=t.dtype, device=device.torch_device)) for t in shapes]
    del held
