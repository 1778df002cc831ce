"""The backend's own hooks over a fake runtime: ops are computed on the host, and ranks talk by gloo."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import npu_reference
from simulator import SimulatedNpu
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from evener.backend.torch_communicator import open_torch_communicator
from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device
from evener.contracts.hooks import hookimpl
from evener_backend_ascend import plugin
from evener_backend_ascend.plugin import evener_graph_capture, evener_kernels, evener_state_providers

__all__ = [
    "evener_communicator", "evener_device", "evener_graph_capture", "evener_kernels", "evener_state_providers",
]  # fmt: skip
#: What a rank's own process keeps until it ends.
_KEPT: list[object] = []


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The device; in a rank's own process, also the simulation of its ops. A test's process has that already."""
    if not any(isinstance(mode, SimulatedNpu) for mode in _get_current_dispatch_mode_stack()):
        _KEPT.extend((npu_reference.register(None), SimulatedNpu().__enter__()))
    return plugin.evener_device(index=index, options=options)


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """Gloo in place of HCCL, which the fake runtime does not have; with tensors of the NPU."""
    del options
    return partial(open_torch_communicator, "gloo")
