"""The hooks: functions that a package's ``module`` implements, marked with ``hookimpl``.

Hooks run at start-up only, never per layer, token or op. They return objects, and the hot path calls the objects. A
function takes all arguments of its hook by name, without defaults. pluggy's wrappers and ordering options are refused,
because no hook sees what another package returned. Implement the hooks that your descriptor announces::

    from evener.contracts.hooks import hookimpl

    @hookimpl
    def evener_device(index, options):
        return MyDevice(index)
"""

# mypy: disable-error-code="empty-body"
# pluggy reads the signature of a specification and never calls it.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from evener.contracts.communicator import CommunicatorFactory
    from evener.contracts.device import Device
    from evener.contracts.graph import GraphCapture
    from evener.contracts.ops import Kernel, OpSchema
    from evener.contracts.quant import QuantScheme
    from evener.contracts.state import StateKind, StateProvider

PROJECT = "evener"
hookspec, hookimpl = pluggy.HookspecMarker(PROJECT), pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """(backends, required) Open device ``index`` of this backend. ``options``: the package's own options, checked."""


@hookspec
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """Kernels for ops: at least one for each name in ``Descriptor.ops``, and none for other ops."""


@hookspec
def evener_op_schemas() -> Sequence[OpSchema]:
    """Ops that this package adds, one for each name in ``Descriptor.op_schemas``."""


@hookspec
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """State providers, one for each name in ``Descriptor.states``. Each implements the interfaces of its ``kinds``."""


@hookspec
def evener_state_kinds() -> Sequence[StateKind]:
    """State kinds that this package adds, one for each name in ``Descriptor.state_kinds``."""


@hookspec
def evener_quant_schemes() -> Sequence[QuantScheme]:
    """Quantization schemes, one for each name in ``Descriptor.formats``."""


@hookspec(firstresult=True)
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """(collectives, or a backend) The factory of this backend's communicators. Default: ``torch.distributed``."""


@hookspec(firstresult=True)
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture | None:
    """(graphs, or a backend) The object that captures steps; None for a device without ``capabilities.graphs``.
    Default: steps run eagerly."""
