"""A host backend that serves the tag ``triton``, for tests: the kernels are chosen as on a device, and interpreted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.contracts.descriptor import Descriptor
from evener.contracts.device import Device
from evener.contracts.hooks import hookimpl
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_conformance.reference.device import HostDevice

descriptor = Descriptor(
    name="interpreted",
    summary="host memory, Triton's interpreter; for tests",
    contracts={"probe": 2, "device": 2},
    probe="triton_host",
    module="triton_host",
    serves=frozenset({"namespace:cpu", "triton"}),
)


def marks() -> Marks:
    """Every machine has a host."""
    return Marks(True, ("every machine has a host",))


def result_from_marks(marks: Marks) -> ProbeResult:
    """Never chosen unless it is named."""
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("the interpreter runs anywhere",))


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The host."""
    return HostDevice(index)
