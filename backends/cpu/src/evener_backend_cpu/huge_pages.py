"""Weights in huge pages. A step of one token reads every weight once, in order. With pages of 4 KiB a processor
spends as long on address translation as on the numbers, above all in a virtual machine, which translates twice."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from evener.contracts.quant import PackedWeight, WeightPart
from evener.ops.reference.linear import PlainPacking

_PAGE = 2 << 20
#: Bytes reserved at a time. Only pages that are written take memory.
_CHUNK = 64 << 20
#: Bytes of a layer's state that have small pages at least: the blocks of a start and of a short context.
_SMALL = 64 << 10
#: Memory of this size has a mapping of its own: glibc's largest threshold is half of it.
_OWN_MAPPING = 64 << 20
_STATE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def available(state: Path = _STATE) -> bool:
    """Whether the system gives huge pages on request (madvise)."""
    return state.exists() and "[never]" not in state.read_text(encoding="ascii")


def begin_small(storage: torch.Tensor) -> None:
    """Give the front of one layer's state small pages, up to the first boundary of huge ones behind 64 KiB.

    A start writes two blocks of each layer. In huge pages they would take 2 MiB a layer, and the time to clear them.

    Args:
        storage: uint8 [blocks, bytes], not written yet; a part of the pool.
    """
    begin, page = storage.data_ptr(), mmap.PAGESIZE
    start, stop = -(-begin // page) * page, -(-(begin + _SMALL) // _PAGE) * _PAGE
    own = storage.untyped_storage().nbytes() >= _OWN_MAPPING
    if own and stop <= begin + storage.nbytes and hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Only advice: a system without huge pages refuses it, and needs none.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_NOHUGEPAGE)


class Arena:
    """Memory for weights, one after another, so that small ones share huge pages. Only tensors keep a chunk alive."""

    def __init__(self) -> None:
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None
        self._at = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, aligned to 64 bytes."""
        count, size = prod(shape), dtype.itemsize
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        chunk = self._chunk()
        if chunk is None or self._at + count * size > len(chunk):
            chunk = self._open(count * size)
        at, self._at = self._at, self._at + -(-count * size // 64) * 64
        return torch.frombuffer(chunk, dtype=dtype, count=count, offset=at).view(tuple(shape))

    def _open(self, nbytes: int) -> mmap.mmap:
        size = -(-max(nbytes, _CHUNK) // _PAGE) * _PAGE + _PAGE
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(mmap.MADV_HUGEPAGE)
        self._at = -ctypes.addressof(ctypes.c_char.from_buffer(chunk)) % _PAGE
        self._chunk = weakref.ref(chunk)
        return chunk


class HugePacking(PlainPacking):
    """The plain layout, in an arena: weights are copied, even if their file could be mapped."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        stack = self.pack_stack([parts], 1, dtype, device)
        return replace(stack, shape=stack.shape[1:], data=stack.data[0])

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        copied = [self._arena.take(each.shape, each.dtype).copy_(each) for each in tensors]
        return super().restored(copied, parts, count, dtype, device)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return False

    def allocate_stack(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._arena.take(shape, dtype)
