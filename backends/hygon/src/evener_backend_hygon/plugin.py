"""The hooks of the Hygon backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.state import StateProvider
from evener.errors import BackendError
from evener_backend_hygon.chips import arch_fault, arch_of, capabilities
from evener_backend_parts.flash_attention import FlashAttention
from evener_backend_parts.gpu import NAMESPACE, GpuDevice, gpu_graphs, open_gpu_communicator
from evener_backend_parts.library import Library

#: The vendor's build comes from its own index.
FLASH_ATTENTION = Library(
    "flash_attn", ("flash-attn",), "2.6", "", "flash-attn from Hygon's package index for this DTK"
)


class HygonDevice(GpuDevice):
    """A DCU."""

    def conditions(self) -> Mapping[str, str]:
        """The version of HIP that torch was built with."""
        return {"hip": str(torch.version.hip)}


class HygonFlashAttention(FlashAttention):
    """The vendor's flash-attn, whose classic kernels need pages of multiples of 128 tokens."""

    name = layout = "hygon.flash_attn"
    library = FLASH_ATTENTION
    sizes = (128,)


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The visible DCU with this index.

    Raises:
        BackendError: torch sees no such device, or it is no known chip.
    """
    if not torch.cuda.is_available():
        raise BackendError(f"torch {torch.__version__} sees no DCU; type `evener doctor`")
    p: Any = torch.cuda.get_device_properties(index)
    reported = options["arch"] or getattr(p, "gcnArchName", "")
    fault = arch_fault(reported)
    if fault:
        raise BackendError(f"device {index} ({p.name}): {fault}; to check this package on it, type hygon.arch=gfx936")
    return HygonDevice(NAMESPACE, index, capabilities(arch_of(reported), p.multi_processor_count))


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """The vendor's attention, used only if the user asks for it."""
    return [HygonFlashAttention()]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """HIP graphs, by torch's names for the namespace."""
    return gpu_graphs(device)


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """RCCL, which answers to torch's name ``nccl``."""
    return open_gpu_communicator
