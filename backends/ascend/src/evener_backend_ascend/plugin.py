"""The hooks of the Ascend backend. Importing it imports torch_npu, which registers the device and its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch_npu

from evener.backend.torch_communicator import open_torch_communicator
from evener.backend.torch_device import TorchDevice
from evener.contracts.communicator import CommunicatorCapabilities, CommunicatorFactory
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener.errors import BackendError
from evener_backend_ascend.blocked_state import BlockedState
from evener_backend_ascend.calls import causal_mask
from evener_backend_ascend.chip import capabilities, chip_of
from evener_backend_ascend.graph import NpuGraphs
from evener_backend_ascend.kernels import KERNELS
from evener_backend_ascend.prolog import NpuLatentAttentionBlock, NpuLatentLinear
from evener_backend_ascend.quantized import NpuInt8GroupedLinear, NpuInt8Linear
from evener_backend_ascend.state import LatentState, PagedState

_HCCL = CommunicatorCapabilities(
    dtypes=frozenset({"float32", "float16", "bfloat16", "int8", "int32", "int64"}), capturable=True
)


class AscendDevice(TorchDevice):
    """One NPU."""

    def conditions(self) -> Mapping[str, str]:
        """Versions of torch_npu and of CANN."""
        return {"torch_npu": str(torch_npu.__version__), "cann": str(getattr(torch.version, "cann", None))}


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The visible NPU with this index."""
    number = int(torch_npu.npu.get_soc_version())
    chip = chip_of(number)
    if chip is None:
        raise BackendError(f"device npu:{index} has the chip number {number}, which this package does not know; "
                           "upgrade it: pip install -U evener-backend-ascend")  # fmt: skip
    # Otherwise npu_format_cast leaves tensors as they are, and warns.
    torch_npu.npu.config.allow_internal_format = True
    return AscendDevice("npu", index, capabilities(chip, options["triton"]))


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """Those for the ops of the descriptor."""
    kinds = (*KERNELS, NpuInt8Linear, NpuInt8GroupedLinear, NpuLatentLinear, NpuLatentAttentionBlock)
    return [kind() for kind in kinds]


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """Pages of keys and values, and of latents, which share one mask; and pages for 310P."""
    mask = causal_mask(device.torch_device)
    return [PagedState(mask), LatentState(mask), BlockedState()]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture | None:
    """NPU graphs, where the chip has them."""
    assert isinstance(device, TorchDevice), "it is this backend's device"
    return NpuGraphs(device) if device.capabilities.graphs else None


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """HCCL."""
    return partial(open_torch_communicator, "hccl", capabilities=_HCCL)
