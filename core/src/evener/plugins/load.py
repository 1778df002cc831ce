"""Loading: import the chosen packages, register their hooks, and hand out what they deliver."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from evener.errors import BackendError, DescriptorError, EvenerError, PluginError
from evener.plugins.catalog import Package, targets
from evener.plugins.choose import Selection
from evener.plugins.delivered import check_delivered, told
from evener.plugins.hub import Hub, Provided
from evener.plugins.options import options_by_package
from evener.plugins.target import prepare_torch_import

if TYPE_CHECKING:
    from evener.contracts.communicator import CommunicatorFactory
    from evener.contracts.device import Device
    from evener.contracts.graph import GraphCapture
    from evener.contracts.ops import Kernel, OpSchema
    from evener.contracts.quant import QuantScheme
    from evener.contracts.state import StateKind, StateProvider


def load(selection: Selection, options: Mapping[str, Mapping[str, Any]] | None = None) -> Loaded:
    """Import what was chosen and nothing else.

    Args:
        selection: from ``choose``.
        options: of the packages, by package name; checked before anything is imported.

    Raises:
        UnknownNameError, ConfigError: wrong options.
        DescriptorError: a module cannot be imported (with the cause), or does not deliver what is announced.
        HookError: a hook is misspelt, unmarked, lacks an argument, or raised.
        DuplicateNameError: two packages deliver one name.
    """
    checked = options_by_package(selection.all_packages, options or {})
    prepare_torch_import()
    hub = Hub()
    for package in selection.all_packages:
        hub.register(package, _module(package), checked[package.key])
    return Loaded(selection, hub)


class Loaded:
    """What the chosen packages deliver. Made by ``load``.

    Attributes:
        backend: the primary backend.
        selection: what was chosen, and why, with the report.
        architectures: lazy targets by name; nothing is imported until ``Target.load``.
    """

    def __init__(self, selection: Selection, hub: Hub) -> None:
        self.backend, self.selection = selection.backend, selection
        self._hub = hub
        self.architectures = targets(hub.packages, "architecture")

    def open_device(self, index: int = 0) -> Device:
        """Open one of the backend's devices.

        Raises:
            BackendError: the backend failed to open it; with the cause.
        """
        package = self.selection.backend
        try:
            device = self._hub.first("evener_device", package, index=index)
            if device is not None:
                check_delivered(package, "evener_device", device)
        except PluginError as error:
            said = str(error).removeprefix(f"{package}: ")
            raise BackendError(f"{package} cannot open device {index}: {said}") from (error.__cause__ or error)
        if device is None:
            raise BackendError(f"{package} has no device {index}; it found {self._devices()}")
        return cast("Device", device)

    def kernels(self, device: Device) -> tuple[Provided[Kernel], ...]:
        """Every package's kernels for ``device``: the backend's first, then in the catalog's order."""
        return self._hub.collect("evener_kernels", self._hub.packages, device)

    def state_providers(self, device: Device) -> tuple[Provided[StateProvider], ...]:
        """Every package's state providers for ``device``, in the same order."""
        return self._hub.collect("evener_state_providers", self._hub.packages, device)

    def op_schemas(self) -> tuple[Provided[OpSchema], ...]:
        """The ops that packages define."""
        return self._hub.delivered("evener_op_schemas")

    def state_kinds(self) -> tuple[Provided[StateKind], ...]:
        """The state kinds that packages define."""
        return self._hub.delivered("evener_state_kinds")

    def quant_schemes(self) -> tuple[Provided[QuantScheme], ...]:
        """The quantization schemes that packages define."""
        return self._hub.delivered("evener_quant_schemes")

    def communicator(self) -> Provided[CommunicatorFactory] | None:
        """How ranks talk: a chosen collective package's way, else the backend's own, else None (core's default).

        Raises:
            BackendError: two chosen collective packages each offer one.
        """
        return self._one("evener_communicator", "evener.collectives", {})

    def graph_capture(self, device: Device) -> Provided[GraphCapture] | None:
        """How ``device`` captures steps: a chosen graph package's way, else the backend's own, else None (eager).

        Raises:
            BackendError: two chosen graph packages each offer one.
        """
        return self._one("evener_graph_capture", "evener.graphs", {"device": device})

    def _one(self, hook: str, group: str, arguments: Mapping[str, Any]) -> Provided[Any] | None:
        """The one object of a hook; packages made for it go before the backend's own."""
        for candidates in ([each for each in self._hub.packages if each.group == group], [self.selection.backend]):
            offers = [
                (package, value)
                for package in candidates
                if (value := self._hub.first(hook, package, **arguments)) is not None
            ]
            if len(offers) > 1:
                first, second = offers[0][0], offers[1][0]
                raise BackendError(
                    f"{first} and {second} both offer what {hook} asks for; "
                    f"disable one: EVENER_DISABLE_PLUGINS={second.distribution}"
                )
            for package, value in offers:
                return Provided(value, package.name, package.distribution, package.version)
        return None

    def _devices(self) -> str:
        found = self.selection.probe.devices
        return ", ".join(f"{each.index} ({each.name})" for each in found) or "none"


def _module(package: Package) -> ModuleType:
    """The module with the package's hooks; an empty one for a package that only carries lazy names."""
    path = package.descriptor.module
    if path is None:
        return ModuleType(package.key)
    try:
        return importlib.import_module(path)
    except EvenerError:
        raise
    except Exception as cause:  # a stranger's module; the cause is kept
        raise DescriptorError(
            f"{package}: importing its module {path} failed with {told(path, cause)}; reinstall {package.distribution},"
            f" mend it if it is yours, or disable it with EVENER_DISABLE_PLUGINS={package.distribution}"
        ) from cause
