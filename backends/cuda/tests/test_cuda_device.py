"""What the backend's device says of memory, over a namespace that counts as torch's does."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from evener_backend_cuda.plugin import CudaDevice
from evener_backend_parts import gpu


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


def test_the_driver_calls_a_python_function_by_its_address() -> None:
    """A capture holds two addresses: of one C function, and of the Python function that it calls."""
    called = list[str]()

    def work() -> None:
        called.append("called")

    thread = threading.Thread(target=gpu._CALL, args=(id(work),))
    thread.start()
    thread.join()
    assert called == ["called"]
