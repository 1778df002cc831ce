"""The device of ``graph.backend``, and its hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.state import StateProvider
from evener_conformance.graph.record import RecordingCapture
from evener_conformance.graph.state import MaskedState
from evener_conformance.reference.device import HostDevice


class GraphDevice(HostDevice):
    """Host memory that captures steps.

    Attributes:
        capture: the graph capture; its ``replays`` show what was captured and how often each ran.
    """

    def __init__(self, index: int, update: bool = False, max_captures: int | None = None) -> None:
        super().__init__(index)
        self.name = "recording host"
        self.capabilities = replace(
            self.capabilities, graphs=True, graph_update=update, max_captures=max_captures, host_lengths=False
        )
        self.capture = RecordingCapture(max_captures, update)


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """Host memory with recording."""
    return GraphDevice(index, options["update"], options["max_captures"])


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """Attention that can be captured."""
    return [MaskedState(options["long_state"])]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """The device's own graph capture."""
    assert isinstance(device, GraphDevice), "it is this backend's device"
    return device.capture
