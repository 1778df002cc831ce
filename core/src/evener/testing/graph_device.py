"""The device of ``graph_backend`` and its hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.state import StateProvider
from evener.testing.graph_record import RecordingCapture
from evener.testing.graph_state import MaskedState
from evener.testing.reference_device import HostDevice


class GraphDevice(HostDevice):
    """Host memory that captures steps.

    Attributes:
        capture: how; its ``replays`` show what was captured and how often each ran.
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
    """The recording host."""
    return GraphDevice(index, options["update"], options["max_captures"])


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """Attention that may be captured."""
    return [MaskedState()]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """The device's own recording."""
    assert isinstance(device, GraphDevice), "the backend's device"
    return device.capture
