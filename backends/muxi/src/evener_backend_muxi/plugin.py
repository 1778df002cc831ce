"""The hooks of the MetaX backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener.errors import BackendError
from evener_backend_muxi.chips import capabilities, chip_of
from evener_backend_parts.flash_attention import FlashAttention
from evener_backend_parts.gpu import NAMESPACE, GpuDevice, gpu_graphs, open_gpu_communicator
from evener_backend_parts.library import Library
from evener_backend_parts.vendor_ops import PublishedOps, VendorOps
from evener_backend_parts.vllm_ops import VendorActAndMul, VendorNorm

_INDEX = "{}, the wheel of your MACA release from MetaX's package index"
FLASH_ATTENTION = Library("flash_attn", ("flash-attn", "flash_attn"), "2.6", "", _INDEX.format("flash_attn"))
MCOPLIB = Library("mcoplib._C", ("mcoplib",), "0", "", _INDEX.format("mcoplib"))
#: Shared memory of a program where torch does not report it: what every GPU has.
_SHARED = 48 << 10


def mcoplib() -> VendorOps:
    """The vendor's op library, and the schemas that our calls were written against."""
    return VendorOps(PublishedOps.read(Path(__file__).parent / "mcoplib.json"), MCOPLIB)


class MuxiDevice(GpuDevice):
    """A MetaX GPU."""

    def conditions(self) -> Mapping[str, str]:
        """The version of MACA that torch was built with."""
        return {"maca": str(getattr(torch.version, "maca", None))}


class MuxiFlashAttention(FlashAttention):
    """The vendor's flash-attn. Pages of 256 tokens: the size that every release of this interface takes."""

    name = layout = "muxi.flash_attn"
    library = FLASH_ATTENTION
    sizes = (256,)


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The visible GPU with this index.

    Raises:
        BackendError: torch sees no such device.
    """
    if not torch.cuda.is_available():
        raise BackendError(f"torch {torch.__version__} sees no MetaX GPU; type `evener doctor`")
    p: Any = torch.cuda.get_device_properties(index)
    chip = options["chip"] or chip_of(p.name)
    # An older torch does not report the memory.
    shared = getattr(p, "shared_memory_per_block", _SHARED)
    return MuxiDevice(NAMESPACE, index, capabilities(chip, p.multi_processor_count, shared))


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """The vendor's ops, used only if the user asks for them."""
    ops = mcoplib()
    return [VendorNorm(ops, "mcoplib"), VendorActAndMul(ops, "mcoplib")]


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """The vendor's attention, used only if the user asks for it."""
    return [MuxiFlashAttention()]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """The vendor's graphs, by torch's names for the namespace."""
    return gpu_graphs(device)


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """MCCL, which answers to torch's name ``nccl``."""
    return open_gpu_communicator
