"""``TorchDevice``, with a stand-in for the torch namespace of an accelerator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import DeviceCapabilities
from evener.errors import BackendError


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    with pytest.raises(BackendError, match="torch sees 1 devices of cpu, so not 7; type `evener doctor`"):
        TorchDevice("cpu", 7, DeviceCapabilities())
    assert torch.cpu.device_count() == 1


def test_peak_memory_is_what_the_namespace_counts_above_what_was_held_before() -> None:
    held = {"now": 100, "peak": 900}

    def work() -> None:
        held["peak"] = max(held["peak"], held["now"] + 40)

    device: Any = SimpleNamespace(index=0)
    device.module = SimpleNamespace(
        memory_allocated=lambda index: held["now"], max_memory_allocated=lambda index: held["peak"],
        reset_peak_memory_stats=lambda index: held.update(peak=held["now"]),
    )  # fmt: skip
    assert TorchDevice.peak_memory(device, work) == 40, "an earlier peak does not count"
