"""Weights in host memory that the device packs, because the device rearranges bits much faster than the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from evener.contracts.device import Device
from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener_offload.expert_slots import map_tensors, page_locked


class PackedByDevice(Packing):
    """A packing of the device's kernels for weights in host memory.

    Args:
        packing: the device's.
        device: packs; it needs memory for one stack at a time. The result is in page-locked host memory if the device
            has any: the copy from the device to other host memory takes ten times as long, and later asynchronous
            copies to the device need page-locked memory.
    """

    def __init__(self, packing: Packing, device: Device) -> None:
        self._packing, self._device, self.layout = packing, device, packing.layout

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return self._packing.supports(parts, dtype)

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return self._packing.nbytes(parts, dtype)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        if self._packing.keeps_storage(parts):
            return self._packing.pack(parts, dtype, device)
        return self._moved(self._packing.pack(parts, dtype, self._device.torch_device), device)

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        left = iter(matrices)
        parts = next(left)
        again = chain([parts], left)
        if self._packing.keeps_storage(parts):
            return self._packing.pack_stack(again, count, dtype, device)
        return self._moved(self._packing.pack_stack(again, count, dtype, self._device.torch_device), device)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return self._packing.keeps_storage(parts)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor] | None:
        return self._packing.saved(packed)

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        return self._packing.restored(tensors, parts, count, dtype, device)

    def _moved(self, packed: PackedWeight, device: torch.device) -> PackedWeight:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            locked = page_locked(self._device, tensor) if device.type == "cpu" else None
            return tensor.to(device) if locked is None else locked

        return replace(packed, data=map_tensors(packed.data, moved))
