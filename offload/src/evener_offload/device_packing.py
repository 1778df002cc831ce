"""Weights in host memory that the device packs, because it is much faster at rearranging bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener_offload.expert_slots import map_tensors


class PackedByDevice(Packing):
    """A packing of the device's kernels for weights in host memory.

    Args:
        packing: the device's.
        torch_device: that packs. A stack at a time needs room on it.
    """

    def __init__(self, packing: Packing, torch_device: torch.device) -> None:
        self._packing, self._torch_device, self.layout = packing, torch_device, packing.layout

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return self._packing.supports(parts, dtype)

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return self._packing.nbytes(parts, dtype)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        if self._packing.keeps_storage(parts):
            return self._packing.pack(parts, dtype, device)
        return _moved(self._packing.pack(parts, dtype, self._torch_device), device)

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        left = iter(matrices)
        parts = next(left)
        again = chain([parts], left)
        if self._packing.keeps_storage(parts):
            return self._packing.pack_stack(again, count, dtype, device)
        return _moved(self._packing.pack_stack(again, count, dtype, self._torch_device), device)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return self._packing.keeps_storage(parts)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor] | None:
        return self._packing.saved(packed)

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        return self._packing.restored(tensors, parts, count, dtype, device)


def _moved(packed: PackedWeight, device: torch.device) -> PackedWeight:
    return replace(packed, data=map_tensors(packed.data, lambda tensor: tensor.to(device)))
