"""Giving a layer's state its pages, and its scales if it is quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.declared import StateSlot
from evener.contracts.device import Device
from evener.contracts.state import StateProvider

if TYPE_CHECKING:
    import torch


def bind_slot(
    slot: StateSlot, provider: StateProvider, storage: torch.Tensor, block_size: int, device: Device
) -> Any:
    """What ``StateProvider.bind`` or ``bind_scaled`` returns for the slot's pages ``storage``."""
    if not slot.scales:
        return provider.bind(storage, slot.spec, block_size)
    import numpy as np

    scales = [device.upload(np.array(each, dtype=np.float32)) for each in slot.scales]
    return provider.bind_scaled(storage, slot.spec, block_size, scales)
