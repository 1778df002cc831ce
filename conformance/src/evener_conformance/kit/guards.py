"""Memory with guards: what a kernel is given, and what it allocates through torch, lies inside larger buffers.

Around each tensor lies NaN (in integers a large negative number): a value that is read there shows in the result. After
a call these guards are compared with their first values, so that a write is seen. In host memory the page behind a
tensor can be neither read nor written: there even a read whose value is not used ends the process, with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.device import Device

#: Least and most bytes of a guard. Between these it is as long as a row of its tensor.
_LEAST, _MOST = 512, 1 << 16
_C = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with a large negative number if the dtype has no NaN."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.is_complex():
        return tensor
    return tensor.fill_(_poison_of(tensor.dtype))


def _poison_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return math.nan
    return 0xA5 if dtype == torch.uint8 else -(torch.iinfo(dtype).max // 3)


@dataclass(frozen=True)
class _Guarded:
    """A buffer with ``count`` elements from ``first`` on that belong to ``name``."""

    name: str
    buffer: torch.Tensor
    first: int
    count: int


class GuardedMemory:
    """Makes tensors with guards, and holds them until the guards are looked at.

    Args:
        guards: without, tensors are made as torch makes them.
    """

    def __init__(self, device: Device, guards: bool = True) -> None:
        self._device, self._guards = device, guards
        self._alignment = max(64, device.capabilities.alignment)
        self._closed_pages = device.torch_device.type == "cpu" and device.capabilities.host_memory and _C is not None
        self._held: list[_Guarded] = []

    def copy(self, value: torch.Tensor, name: str, *, flush: bool = False) -> torch.Tensor:
        """A copy on the device, with the strides that it has. ``flush``: on the host it ends where the closed page
        begins, at whatever address it then starts; else the alignment of memory that core allocates is kept."""
        if not self._guards or not _can_be_guarded(value):
            return value.to(self._device.torch_device, copy=True)
        return self._empty(tuple(value.shape), value.stride(), value.dtype, name, flush).copy_(value)

    def empty_like(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Poisoned memory of the same shape, strides and dtype; the tensor itself, poisoned, if it takes no guards."""
        if not self._guards or value.device.type != self._device.torch_device.type or not _can_be_guarded(value):
            return poison(value)
        return self._empty(tuple(value.shape), value.stride(), value.dtype, name)

    def place(self, value: Any, name: str) -> Any:
        """Copies of the tensors in a value: a tensor, or tuples, lists and dictionaries of them. Anything else, also
        views of wider memory and values whose tensors share memory, is returned as it is."""
        found = list(_tensors(value))
        own = {t.untyped_storage().data_ptr() for t in found}
        if not self._guards or len(own) < len(found) or not all(map(_fills_its_storage, found)):
            return value
        return self._placed(value, name)

    def _placed(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self.copy(value, name)
        if isinstance(value, Mapping):
            return type(value)({key: self._placed(each, f"{name}[{key!r}]") for key, each in value.items()})  # type: ignore[call-arg]
        if type(value) in (tuple, list):
            return type(value)(self._placed(each, f"{name}[{i}]") for i, each in enumerate(value))
        return value

    def problems(self) -> list[str]:
        """The writes outside of the tensors made so far; these are not held any longer."""
        held, self._held = self._held, []
        return list(dict.fromkeys(text for each in held for text in self._written(each)))

    def _written(self, it: _Guarded) -> Iterator[str]:
        for where, part in (
            ("in front of", it.buffer[: it.first]), ("behind the end of", it.buffer[it.first + it.count :]),
        ):  # fmt: skip
            if part.numel():
                seen = self._device.readback(part).wait()
                if not (seen.isnan() if seen.is_floating_point() else seen == _poison_of(seen.dtype)).all():
                    yield f"it writes {where} {it.name}"

    def _empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, name: str, flush: bool = False
    ) -> torch.Tensor:
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        row = count * dtype.itemsize // max(1, shape[0] if shape else 1)
        before = -(-_LEAST // self._alignment) * self._alignment
        if self._closed_pages:
            buffer, first = _closed_behind(count, before, dtype, dtype.itemsize if flush else self._alignment)
        else:
            first = before // dtype.itemsize
            behind = min(_MOST, max(_LEAST, row)) // dtype.itemsize
            buffer = torch.empty(first + count + behind, dtype=dtype, device=self._device.torch_device)
        self._held.append(_Guarded(name, poison(buffer), first, count))
        return torch.as_strided(buffer, shape, stride, first)


def _closed_behind(count: int, before: int, dtype: torch.dtype, alignment: int) -> tuple[torch.Tensor, int]:
    """Host memory that ends with a page which cannot be accessed, and the index in it of the first of ``count``
    elements, ``before`` bytes or more from its start."""
    page, size = mmap.PAGESIZE, -(-count * dtype.itemsize // alignment) * alignment
    whole = -(-(before + size) // page) * page
    memory = mmap.mmap(-1, whole + page)
    assert _C is not None, "the caller asked"
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + whole
    if _C.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    # The tensor keeps the memory alive.
    return torch.frombuffer(memory, dtype=dtype, count=whole // dtype.itemsize), (whole - size) // dtype.itemsize


def _can_be_guarded(value: torch.Tensor) -> bool:
    plain = value.layout == torch.strided and not value.is_complex() and value.dtype != torch.bool
    return plain and value.numel() > 0 and all(s > 0 for s, n in zip(value.stride(), value.shape, strict=True) if n > 1)


def _fills_its_storage(value: torch.Tensor) -> bool:
    return value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif type(value) in (tuple, list):
        for each in value:
            yield from _tensors(each)
