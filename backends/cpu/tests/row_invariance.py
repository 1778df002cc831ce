"""Rows of a product that do not depend on the rows beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from evener_backend_cpu.device import CpuDevice


def check_invariance(
    device: CpuDevice, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, counts: Iterable[int]
) -> None:
    """Assert that the first rows of ``x`` [n, columns] alone, and any number of threads, give equal bits."""
    whole = multiply(x)
    for count in counts:
        assert torch.equal(multiply(x[:count]), whole[:count])
    before = device.threads
    try:
        for threads in (1, 3):
            device.limit_threads(threads)
            assert torch.equal(multiply(x), whole)
    finally:
        device.limit_threads(before)
