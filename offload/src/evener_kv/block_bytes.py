"""Blocks of one state group as rows of bytes: the same block of all layers, one after another.

Most providers keep all of a block in the pool's pages, so a copy of these bytes is a copy of the block, also of
quantized state. It never leaves the run, so nobody has to know its layout. A provider that allocates memory of its own
exports and imports blocks in the canonical layout, in which quantized state is not quantized.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.quant import DTYPE_BYTES
from evener.contracts.state import StoredStateProvider
from evener.engine.worker.geometry import Geometry, Group


class BlockBytes(ABC):
    """``nbytes``: of one block, a multiple of 4; 0 if this rank has no layer of the group."""

    nbytes: int

    def __init__(self, device: Device, span: int) -> None:
        self._device, self._span = device, span

    def _indices(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._device.upload(np.array(blocks, dtype=np.int32) // self._span)

    @abstractmethod
    def read(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copy blocks to the first rows of uint8 [at least n, nbytes], contiguous and on the device."""

    @abstractmethod
    def write(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copy the first rows to blocks. Mutates the state."""


class PooledBlocks(BlockBytes):
    """Blocks in the pool's pages, in one launch for all layers."""

    def __init__(self, device: Device, span: int, group: Group, storage: torch.Tensor) -> None:
        super().__init__(device, span)
        layers, slabs, slab_bytes = len(group.slots), storage.shape[1], storage.shape[2]
        words = slab_bytes // group.cut // 4
        pages = storage.view(torch.int32).view(storage.shape[0], slabs * group.cut, words)
        self._blocks = pages[:layers].transpose(0, 1)  # [blocks, layers, words]
        self.nbytes = 4 * layers * words

    def _words(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        return rows[:count].view(torch.int32).view(count, *self._blocks.shape[1:])

    def read(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        torch.index_select(self._blocks, 0, self._indices(blocks), out=self._words(rows, len(blocks)))

    def write(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        self._blocks.index_copy_(0, self._indices(blocks).long(), self._words(rows, len(blocks)))


class ExportedBlocks(BlockBytes):
    """Blocks of a provider with memory of its own, layer by layer."""

    def __init__(self, device: Device, span: int, group: Group, block_size: int) -> None:
        super().__init__(device, span)
        self._group, per = group, (block_size,) if group.spec.per == "token" else ()
        self._provider = cast(StoredStateProvider, group.provider)  # what owns memory stores blocks in it
        self._shapes = [(*per, *tensor.shape) for tensor in group.spec.tensors]
        self._dtypes = [tensor.wide or tensor.dtype for tensor in group.spec.tensors]
        sizes = [math.prod(s) * DTYPE_BYTES[d] for s, d in zip(self._shapes, self._dtypes, strict=True)]
        self._sizes = [-(-int(size) // 16) * 16 for size in sizes]  # so that views of any dtype are aligned
        self.nbytes = sum(self._sizes) * len(group.slots)

    def _parts(self, rows: torch.Tensor, count: int) -> list[list[torch.Tensor]]:
        """For each layer, each tensor of the spec [n, *shape] as a view of the rows."""
        pieces = iter(rows[:count].split(self._sizes * len(self._group.slots), dim=1))

        def one(shape: Sequence[int], dtype: str) -> torch.Tensor:
            length = int(math.prod(shape) * DTYPE_BYTES[dtype])
            elements: torch.Tensor = next(pieces)[:, :length].view(getattr(torch, dtype))
            return elements.view(count, *shape)

        return [list(map(one, self._shapes, self._dtypes)) for _ in self._group.slots]

    def read(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        indices = self._indices(blocks)
        for slot, parts in zip(self._group.slots, self._parts(rows, len(blocks)), strict=True):
            for part, value in zip(parts, self._provider.export_blocks(slot.views, indices), strict=True):
                part.copy_(value)

    def write(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        indices = self._indices(blocks)
        for slot, parts in zip(self._group.slots, self._parts(rows, len(blocks)), strict=True):
            self._provider.import_blocks(slot.views, indices, [part.contiguous() for part in parts])


def block_bytes(geometry: Geometry, storage: torch.Tensor, device: Device) -> list[BlockBytes]:
    """One for each group."""
    return [
        ExportedBlocks(device, span, group, geometry.block_size) if group.provider.owns_memory
        else PooledBlocks(device, span, group, storage)
        for group, span in zip(geometry.groups, geometry.spans, strict=True)
    ]  # fmt: skip
