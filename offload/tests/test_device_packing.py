"""Weights of host memory that the device packs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener_offload.device_packing import PackedByDevice


class Doubled(Packing):
    """Twice the numbers; notes where it packed."""

    layout = "doubled"

    def __init__(self, keeps: bool) -> None:
        self._keeps, self.where = keeps, list[torch.device]()

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return 16

    def pack(self, parts: Any, dtype: str, device: torch.device) -> PackedWeight:
        self.where.append(device)
        return PackedWeight(self.layout, (2, 2), torch.full((2, 2), 2.0 * parts[0], device=device), 16)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return self._keeps


def test_a_stack_is_packed_on_the_device_and_lies_in_host_memory() -> None:
    inner, host = Doubled(False), torch.device("cpu")
    device: Any = SimpleNamespace(torch_device=torch.device("cpu", 0), pinned_buffers=lambda count, nbytes: [])
    packing = PackedByDevice(inner, device)
    assert (packing.layout, packing.nbytes([], "float32"), packing.supports([], "float32")) == ("doubled", 16, None)
    packed: PackedWeight = packing.pack_stack(iter([[1.0], [2.0]]), 2, "float32", host)  # type: ignore[list-item]
    assert packed.shape == (2, 2, 2) and packed.nbytes == 32
    assert [float(each[0, 0]) for each in packed.data] == [2.0, 4.0]
    assert inner.where == [torch.device("cpu", 0)] * 2
    assert packing.pack([3.0], "float32", host).data[0, 0] == 6.0  # type: ignore[list-item]


def test_the_result_lies_in_the_page_locked_memory_of_the_device_that_packs() -> None:
    locked = [torch.empty(64, dtype=torch.uint8)]
    device: Any = SimpleNamespace(torch_device=torch.device("cpu", 0), pinned_buffers=lambda count, nbytes: locked)
    packed = PackedByDevice(Doubled(False), device).pack([3.0], "float32", torch.device("cpu"))  # type: ignore[list-item]
    assert packed.data.data_ptr() == locked[0].data_ptr() and packed.data.tolist() == [[6.0, 6.0], [6.0, 6.0]]


def test_weights_that_stay_where_they_are_never_see_the_device() -> None:
    inner, host = Doubled(True), torch.device("cpu")
    packing = PackedByDevice(inner, None)  # type: ignore[arg-type]
    packing.pack([1.0], "float32", host)  # type: ignore[list-item]
    packing.pack_stack([[1.0]], 1, "float32", host)  # type: ignore[list-item]
    assert inner.where == [host, host] and packing.keeps_storage([])
