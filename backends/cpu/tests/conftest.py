"""The fixture of the tests of kernels."""

from __future__ import annotations

import pytest

from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import Native


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    """The CPU with its native kernels, which have to be there."""
    device = CpuDevice(0, {})
    assert isinstance(device.native, Native)
    return device
