"""What the host writes ahead of the device arrives as it was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from evener.engine.inputs.captured_inputs import Staging
from evener_conformance.reference.device import HostDevice


class LateDevice(HostDevice):
    """Copies from page-locked memory when it is waited for, no sooner."""

    def __init__(self) -> None:
        super().__init__(0)
        self.work: list[Callable[[], object]] = []
        self.waits = 0

    def pinned_buffers(self, count: int, nbytes: int) -> Sequence[torch.Tensor]:
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]

    def new_event(self) -> Any:
        return _Event(self)


class _Event:
    def __init__(self, device: LateDevice) -> None:
        self._device, self._behind = device, list[Callable[[], object]]()

    def record(self) -> None:
        self._behind = list(self._device.work)

    def synchronize(self) -> None:
        self._device.waits += 1
        for work in self._behind:
            work()
            self._device.work.remove(work)
        self._behind = []


class _LateTarget:
    """A tensor of that device: what is copied into it shows in ``seen``, in order."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self.seen = device, list[list[int]]()

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait for the device"
        self._device.work.append(lambda: self.seen.append(source.tolist()))


@pytest.mark.parametrize("count", [2, 4, 32])
def test_nothing_is_written_over_before_it_was_copied(count: int) -> None:
    device = LateDevice()
    staging = Staging(device, torch.full((3,), 7, dtype=torch.int32), count, 7)
    late: Any = _LateTarget(device)
    staging._target = late
    for step in range(5 * count):
        staging.next()[:] = step
        staging.send()
        assert len(device.work) <= count
    device_waits = device.waits
    for work in device.work:
        work()
    assert late.seen == [[step] * 3 for step in range(5 * count)]
    assert device_waits <= 10, "the host looks twice a round, not at each step"


@pytest.mark.parametrize("device", [HostDevice(0), LateDevice()], ids=["uploads", "page-locked"])
def test_values_that_are_not_written_are_the_first_value(device: HostDevice) -> None:
    target = torch.zeros((2, 3), dtype=torch.int32)
    staging = Staging(device, target, 4, -1)
    for step in range(3):
        staging.next()[0] = step
        staging.send()
        assert target.tolist() == [[step] * 3, [-1] * 3]
