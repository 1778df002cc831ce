"""The hooks of the CPU backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.device import Device
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener.errors import BackendError
from evener_backend_cpu.adapters import NativeAdapters
from evener_backend_cpu.composites import COMPOSITES
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import EXPERTS
from evener_backend_cpu.latent import FlashPartialAttention, LatentState
from evener_backend_cpu.layer_norm import LayerNorm
from evener_backend_cpu.primitives import PRIMITIVES
from evener_backend_cpu.screened_head import SCREENED
from evener_backend_cpu.state import PagedState


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The CPU."""
    return CpuDevice(index, options)


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """Every kernel; without a compiler each refuses with the reason."""
    kinds = (*PRIMITIVES, LayerNorm, FlashPartialAttention, NativeAdapters, *EXPERTS, *COMPOSITES, *SCREENED)
    return [kind(_own(device)) for kind in kinds]


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """The paged state, and that of latent attention."""
    return [PagedState(_own(device)), LatentState(_own(device))]


def _own(device: Device) -> CpuDevice:
    if not isinstance(device, CpuDevice):
        raise BackendError(f"the cpu backend's kernels run on its own device, not on a {type(device).__name__}")
    return device
