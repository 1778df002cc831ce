"""The simulated backend's hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.backend.torch_communicator import open_torch_communicator
from evener.contracts.communicator import Communicator, CommunicatorFactory
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener_conformance.simulated import descriptor
from evener_conformance.simulated.constraints import Constraints
from evener_conformance.simulated.device import SimulatedDevice
from evener_conformance.simulated.kernels import kernels
from evener_conformance.simulated.rows import SimulatedRows
from evener_conformance.simulated.state import SimulatedPaged


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The chip, with its constraints."""
    return SimulatedDevice(index, Constraints.of(options))


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """The chip's own kernels."""
    assert isinstance(device, SimulatedDevice), "the backend's device"
    return kernels(device, descriptor.ops)


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """Providers of the chip's own state layouts."""
    assert isinstance(device, SimulatedDevice), "the backend's device"
    return [SimulatedPaged(device), SimulatedRows(device)]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """The device's own graph capture."""
    assert isinstance(device, SimulatedDevice), "the backend's device"
    return device.capture


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """Gloo, over the same host memory."""

    def factory(name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
        return open_torch_communicator("gloo", name, ranks, rank, world_size, init_method)

    return factory
