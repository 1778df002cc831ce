"""The hooks of the GCU backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evener.backend.torch_communicator import open_torch_communicator
from evener.contracts.communicator import Communicator, CommunicatorCapabilities, CommunicatorFactory
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener_backend_gcu.device import GcuDevice, capabilities
from evener_backend_gcu.kernels import GcuHostSort, GcuRotary
from evener_backend_gcu.probe import import_extension
from evener_backend_gcu.quantized import GcuIntegerExperts, GcuIntegers
from evener_backend_gcu.state import GcuPaged
from evener_backend_gcu.vendor_library import vendor_ops
from evener_backend_parts.graphs import TorchGraphs
from evener_backend_parts.vendor_ops import VendorOps
from evener_backend_parts.vllm_ops import VendorActAndMul, VendorNorm

NAMESPACE, LIBRARY = "gcu", "eccl"
_DTYPES = ("float32", "float16", "bfloat16")
#: The vendor's products over integers compute in these.
_HALVES = ("float16", "bfloat16")
_ECCL = CommunicatorCapabilities(dtypes=frozenset({"float32", "float16", "bfloat16", "int32"}))


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The visible GCU with this index.

    Raises:
        BackendError: torch_gcu does not import, or sees no such device.
    """
    import_extension()
    module = torch.get_device_module(NAMESPACE)
    major = module.get_device_capability(index)[0] if index < module.device_count() else 0
    return GcuDevice(NAMESPACE, index, capabilities(int(major), options["graphs"]))


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """The vendor's ops, and sampling that sorts on the host."""
    return kernels(vendor_ops())


def kernels(ops: VendorOps) -> list[Kernel]:
    """This package's kernels over an op library."""
    return [
        *(kind(ops, "gcu", 100, _DTYPES) for kind in (VendorNorm, VendorActAndMul, GcuRotary)),
        *(kind(ops, "gcu.integers", 100, _HALVES) for kind in (GcuIntegers, GcuIntegerExperts)), GcuHostSort(),
    ]  # fmt: skip


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """State in the vendor's layout."""
    return [GcuPaged(vendor_ops())]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture | None:
    """``GCUGraph``, if the user switched it on."""
    if not device.capabilities.graphs:
        return None
    assert isinstance(device, GcuDevice), "it is this backend's device"
    return TorchGraphs(device, device.module.GCUGraph, device.module.graph_pool_handle)


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """ECCL."""

    def factory(name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
        return open_torch_communicator(LIBRARY, name, ranks, rank, world_size, init_method, _ECCL)

    return factory
