"""What is checked: one backend, with everything that it delivers on the device here, or without a device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener.backend_search import BackendSearch
from evener.builtin import BUILTINS
from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device, DeviceCapabilities
from evener.contracts.graph import GraphCapture
from evener.contracts.interfaces import INTERFACES
from evener.contracts.ops import Kernel, OpSchema
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.contracts.quant import QuantScheme
from evener.contracts.state import StateProvider
from evener.errors import BackendError, NoBackendError
from evener.plugins.catalog import Provided
from evener.plugins.choose import choose
from evener.plugins.discover import installed_catalog
from evener.plugins.load import LoadedPackages, load
from evener.plugins.probe import ProbeOutcome
from evener_conformance.reference.device import HostDevice

#: Packages in these groups compute, so what they register is checked. Of ``evener.plugins``, state providers are.
_CHECKED_GROUPS = ("evener.backends", "evener.kernels", "evener.graphs", "evener.collectives")


class PretendDevice(HostDevice):
    """Host memory in place of the hardware, with the default, conservative capabilities."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.name = "no device (pretended)"
        self.capabilities = DeviceCapabilities(
            dtypes=frozenset({"float32", "bfloat16", "float16"}), alignment=512, host_memory=True
        )


@dataclass(frozen=True)
class Subject:
    """A loaded backend, and everything that it and the packages for it deliver.

    Attributes:
        pretended: its hardware may be absent; ``device`` is the backend's own if it opens, else host memory.
        schemas: all ops; ``own_ops``: those that it adds.
        facts: what the probe's answer depends on, such as the driver's version.
    """

    loaded: LoadedPackages
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
        """Level of evidence of a run on it (docs/support.md)."""
        return "L3" if self.pretended or self.device.simulated else "L5"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Compute dtypes that the device claims, the widest first."""
        claimed = self.device.capabilities.dtypes | self.device.capabilities.emulated
        return tuple(d for d in ("float32", "bfloat16", "float16") if d in claimed)


def open_subject(
    backend: str, pretend: bool = False, options: Mapping[str, Mapping[str, Any]] | None = None, index: int = 0
) -> Subject:
    """Find the backend, load it and open a device of it, by default its first.

    Args:
        pretend: do not probe, and use host memory if the device does not open.
        options: options of packages, by package name.

    Raises:
        PluginError: it is not installed, its hardware is not here, or it does not deliver what it announces.
    """
    options = options or {}
    loaded = _load_pretended(backend, options) if pretend else BackendSearch(backend).load(options)
    try:
        device = loaded.open_device(index)
    except BackendError:
        if not pretend:
            raise
        device = PretendDevice(0)
    # Two, so that what threads share is checked too. Sizes are tiny: more would only wait for each other.
    device.limit_threads(2)
    device.select()
    checked_packages = {p.name for p in loaded.selection.all_packages if p.group in _CHECKED_GROUPS}
    schemas = loaded.op_schemas()
    # Only the package that adds a kind of state knows what its providers compute: its own tests check them.
    added = {p.value.name for p in loaded.state_kinds()} - INTERFACES.keys()
    states = [p for p in loaded.state_providers(device) if not p.value.kinds <= added]
    marks = importlib.import_module(loaded.selection.backend.descriptor.probe or "").marks()
    return Subject(
        loaded, device, pretend,
        tuple(p for p in loaded.kernels(device) if p.package in checked_packages),
        tuple(p for p in states if p.package not in {each.name for each in BUILTINS}),
        {p.value.name: p.value for p in schemas},
        tuple(p.value.name for p in schemas if p.package in checked_packages),
        loaded.quant_schemes(),
        loaded.communicator(),
        None if isinstance(device, PretendDevice) else loaded.graph_capture(device),
        dict(marks.cache_key), options,
    )  # fmt: skip


def _load_pretended(backend: str, options: Mapping[str, Mapping[str, Any]]) -> LoadedPackages:
    catalog = installed_catalog(builtins=BUILTINS)
    if backend not in {package.name for package in catalog.backends}:
        choose(catalog, backend)  # raises, with what is installed
        raise NoBackendError(f"no backend {backend!r} is installed")
    # Two, because collectives are checked on two ranks; each is opened before it is used.
    answer = ProbeResult(1, tuple(ProbedDevice(index, "no device") for index in range(2)), ("pretended",))
    probes = {
        package.name: ProbeOutcome(package, Marks(package.name == backend, ("pretended",)),
                             answer if package.name == backend else None)
        for package in catalog.backends
    }  # fmt: skip
    return load(choose(catalog, backend, probes=probes), options)


class OpenedBackend(LoadedPackages):
    """A backend whose device is open already, to start an engine with."""

    def __init__(self, subject: Subject) -> None:
        vars(self).update(vars(subject.loaded))
        self._device = subject.device

    def open_device(self, index: int = 0) -> Device:
        if index:
            raise BackendError(f"the kit opened device 0, but device {index} was asked for")
        return self._device
