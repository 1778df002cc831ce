"""What the backend's device says of memory, over a namespace that counts as torch's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from evener_backend_cuda.plugin import CudaDevice


def test_peak_memory_counts_requested_bytes_not_allocator_blocks() -> None:
    asked, given = {"current": 100, "peak": 900}, {"peak": 5000}

    def work() -> None:
        asked["peak"] = max(asked["peak"], asked["current"] + 40)
        given["peak"] += 1 << 20  # a block of the pool that is a megabyte too long, and is not split

    device: Any = SimpleNamespace(index=0)
    device.module = SimpleNamespace(
        memory_stats=lambda index: {f"requested_bytes.all.{key}": value for key, value in asked.items()},
        reset_peak_memory_stats=lambda index: asked.update(peak=asked["current"]),
        memory_allocated=lambda index: 5000, max_memory_allocated=lambda index: given["peak"],
    )  # fmt: skip
    assert CudaDevice.peak_memory(device, work) == 40, "an earlier peak does not count"
