"""What is asked: one backend with everything that it delivers on the device at hand, or on none."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener.builtin import BUILTINS
from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device, DeviceCapabilities
from evener.contracts.graph import GraphCapture
from evener.contracts.ops import Kernel, OpSchema
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.contracts.quant import QuantScheme
from evener.contracts.state import StateProvider
from evener.errors import BackendError, NoBackendError
from evener.plugins.choose import choose
from evener.plugins.discover import discover
from evener.plugins.hub import Provided
from evener.plugins.load import Loaded, load
from evener.plugins.probe import Probed
from evener.search import Search
from evener.testing.reference_device import HostDevice

#: Packages in these groups answer for what they register; plugins only bring what nobody computes with by itself.
_JUDGED = ("evener.backends", "evener.kernels", "evener.graphs", "evener.collectives")


class PretendDevice(HostDevice):
    """Host memory in place of the hardware, with the most careful capabilities."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.name = "no device (pretended)"
        self.capabilities = DeviceCapabilities(
            dtypes=frozenset({"float32", "bfloat16", "float16"}), alignment=512, host_memory=True
        )


@dataclass(frozen=True)
class Subject:
    """A backend that was loaded, and what it and the packages made for it deliver.

    Attributes:
        pretended: its hardware need not be here; ``device`` is its own if that opens, else host memory.
        schemas: all ops; ``own_ops``: those that it adds.
        facts: what its probe says that the answer depends on, such as the driver's version.
    """

    loaded: Loaded
    device: Device
    pretended: bool
    kernels: tuple[Provided[Kernel], ...]
    states: tuple[Provided[StateProvider], ...]
    schemas: Mapping[str, OpSchema]
    own_ops: tuple[str, ...]
    schemes: tuple[Provided[QuantScheme], ...]
    communicator: Provided[CommunicatorFactory] | None
    graphs: Provided[GraphCapture] | None
    facts: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The backend's."""
        return self.loaded.backend.name

    @property
    def level(self) -> str:
        """Of the evidence that a run on it is (docs/support.md)."""
        return "L3" if self.pretended or self.device.simulated else "L5"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Compute types that the device claims, the widest first."""
        claimed = self.device.capabilities.dtypes | self.device.capabilities.emulated
        return tuple(d for d in ("float32", "bfloat16", "float16") if d in claimed)


def open_subject(
    backend: str, pretend: bool = False, options: Mapping[str, Mapping[str, Any]] | None = None, index: int = 0
) -> Subject:
    """Find the backend, load it and open a device of it, by default its first.

    Args:
        pretend: do without its hardware: probe nothing, and take host memory for a device that does not open.
        options: of packages, by name.

    Raises:
        PluginError: it is not installed, its hardware is not here, or it does not deliver what it announces.
    """
    options = options or {}
    loaded = _pretended(backend, options) if pretend else Search(backend).load(options)
    try:
        device = loaded.open_device(index)
    except BackendError:
        if not pretend:
            raise
        device = PretendDevice(0)
    # Sizes are tiny: threads would wait for each other.
    device.limit_threads(1)
    device.select()
    judged = {p.name for p in loaded.selection.all_packages if p.group in _JUDGED}
    schemas = loaded.op_schemas()
    marks = importlib.import_module(loaded.selection.backend.descriptor.probe or "").marks()
    return Subject(
        loaded, device, pretend,
        tuple(p for p in loaded.kernels(device) if p.package in judged),
        tuple(p for p in loaded.state_providers(device) if p.package in judged),
        {p.value.name: p.value for p in schemas},
        tuple(p.value.name for p in schemas if p.package in judged),
        loaded.quant_schemes(),
        loaded.communicator(),
        None if isinstance(device, PretendDevice) else loaded.graph_capture(device),
        dict(marks.cache_key), options,
    )  # fmt: skip


def _pretended(backend: str, options: Mapping[str, Mapping[str, Any]]) -> Loaded:
    catalog = discover(builtins=BUILTINS)
    if backend not in {package.name for package in catalog.backends}:
        choose(catalog, backend)  # raises, with what is installed
        raise NoBackendError(f"no backend {backend!r} is installed")
    answer = ProbeResult(1, (ProbedDevice(0, "no device"),), ("pretended",))
    probes = {
        package.name: Probed(package, Marks(package.name == backend, ("pretended",)),
                             answer if package.name == backend else None)
        for package in catalog.backends
    }  # fmt: skip
    return load(choose(catalog, backend, probes=probes), options)


class Opened(Loaded):
    """A backend whose device is open already: what an engine is started with."""

    def __init__(self, subject: Subject) -> None:
        vars(self).update(vars(subject.loaded))
        self._device = subject.device

    def open_device(self, index: int = 0) -> Device:
        if index:
            raise BackendError(f"the kit opened device 0, and device {index} was asked for")
        return self._device
