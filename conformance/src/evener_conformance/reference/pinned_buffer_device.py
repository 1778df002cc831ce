"""A test device that reads from upload buffers as late as the contract allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evener_conformance.reference.device import HostDevice


class PinnedBufferDevice(HostDevice):
    """Host memory with "page-locked" buffers, used in turn.

    A device's queue runs in order, so work after a copy sees the copied values, but the source may be read until
    somebody has waited for the event. Here it is an error if the source changed before that; then it is overwritten.

    Attributes:
        buffers: buffers that were handed out; asked: counts and sizes that were requested.
    """

    def __init__(self, count: int = 3, nbytes: int = 64) -> None:
        super().__init__(0)
        self.buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
        self.asked: list[tuple[int, int]] = []
        self.copies = 0

    def pinned_buffers(self, count: int, nbytes: int) -> Sequence[torch.Tensor]:
        self.asked.append((count, nbytes))
        return self.buffers

    def new_event(self) -> Any:
        self.copies += 1
        return _Event(self.buffers[(self.copies - 1) % len(self.buffers)])


class _Event:
    def __init__(self, source: torch.Tensor) -> None:
        self._source, self._held = source, torch.empty(0)

    def record(self) -> None:
        self._held = self._source.clone()

    def synchronize(self) -> None:
        if self._held.numel():
            assert torch.equal(self._source, self._held), "a buffer was written while it was still copied from"
            self._source.fill_(255)
            self._held = torch.empty(0)
