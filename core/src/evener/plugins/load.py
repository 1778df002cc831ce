"""Loading: import the chosen packages, register their hooks, and collect the objects that they deliver. Registration is
pluggy with checks of our own; a package is registered as a whole or not at all."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pluggy

from evener.contracts import hooks
from evener.errors import (
    BackendError,
    DescriptorError,
    DuplicateNameError,
    EvenerError,
    HookError,
    PluginError,
    UnknownNameError,
    did_you_mean,
)
from evener.key_spec import KeySpec, read
from evener.plugins.catalog import Catalog, Package, Provided, prepare_torch_import
from evener.plugins.choose import Selection
from evener.plugins.hook_check import ANNOUNCED, check_delivered, check_hooks, describe_exception

if TYPE_CHECKING:
    from evener.contracts.communicator import CommunicatorFactory
    from evener.contracts.device import Device
    from evener.contracts.graph import GraphCapture
    from evener.contracts.ops import Kernel, OpSchema
    from evener.contracts.quant import QuantScheme
    from evener.contracts.state import StateKind, StateProvider

#: Hooks without arguments: called once, when the package is registered.
_AT_REGISTRATION = ("evener_op_schemas", "evener_state_kinds", "evener_quant_schemes")


def load(selection: Selection, options: Mapping[str, Mapping[str, Any]] | None = None) -> LoadedPackages:
    """Import the chosen packages and no others.

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
    registry = PluginRegistry()
    for package in selection.all_packages:
        registry.register(package, _module(package), checked[package.key])
    return LoadedPackages(selection, registry)


class LoadedPackages:
    """What the chosen packages deliver. Made by ``load``.

    Attributes:
        backend: the primary backend.
        selection: what was chosen, and why, with the report.
        architectures: by name; nothing is imported until ``LazyImport.load``.
    """

    def __init__(self, selection: Selection, registry: PluginRegistry) -> None:
        self.backend, self.selection = selection.backend, selection
        self._registry = registry
        self.architectures = Catalog(registry.packages).lazy_imports("architecture")

    def open_device(self, index: int = 0) -> Device:
        """Open one of the backend's devices.

        Raises:
            BackendError: the backend failed to open it; with the cause.
        """
        package = self.selection.backend
        try:
            device = self._registry.first("evener_device", package, index=index)
            if device is not None:
                check_delivered(package, "evener_device", device)
        except PluginError as error:
            said = str(error).removeprefix(f"{package}: ")
            raise BackendError(f"{package} cannot open device {index}: {said}") from (error.__cause__ or error)
        found = {each.index: each.name for each in self.selection.probe.devices}
        # Ranks share the host's memory; two of them on one chip would each take it for their own.
        if device is None or (found and index not in found and not device.capabilities.host_memory):
            shown = ", ".join(f"{number} ({name})" for number, name in found.items()) or "none"
            raise BackendError(f"{package} has no device {index}; it found {shown}")
        return cast("Device", device)

    def kernels(self, device: Device) -> tuple[Provided[Kernel], ...]:
        """Every package's kernels for ``device``: the backend's first, then in the catalog's order."""
        return self._registry.collect("evener_kernels", self._registry.packages, device)

    def state_providers(self, device: Device) -> tuple[Provided[StateProvider], ...]:
        """Every package's state providers for ``device``, in the same order."""
        return self._registry.collect("evener_state_providers", self._registry.packages, device)

    def op_schemas(self) -> tuple[Provided[OpSchema], ...]:
        """The ops that packages define."""
        return self._registry.delivered("evener_op_schemas")

    def state_kinds(self) -> tuple[Provided[StateKind], ...]:
        """The state kinds that packages define."""
        return self._registry.delivered("evener_state_kinds")

    def quant_schemes(self) -> tuple[Provided[QuantScheme], ...]:
        """The quantization schemes that packages define."""
        return self._registry.delivered("evener_quant_schemes")

    def communicator(self) -> Provided[CommunicatorFactory] | None:
        """What makes communicators: of a chosen collective package, else of the backend, else None (core's default).

        Raises:
            BackendError: two chosen collective packages implement the hook.
        """
        return self._one("evener_communicator", "evener.collectives", {})

    def graph_capture(self, device: Device) -> Provided[GraphCapture] | None:
        """What captures steps on ``device``: of a chosen graph package, else of the backend, else None (eager).

        Raises:
            BackendError: two chosen graph packages implement the hook.
        """
        return self._one("evener_graph_capture", "evener.graphs", {"device": device})

    def _one(self, hook: str, group: str, arguments: Mapping[str, Any]) -> Provided[Any] | None:
        """The one object of a hook; packages of ``group`` go before the backend. None if no package implements it."""
        for candidates in ([each for each in self._registry.packages if each.group == group], [self.selection.backend]):
            found = [(package, self._registry.first(hook, package, **arguments)) for package in candidates]
            found = [(package, value) for package, value in found if value is not None]
            if len(found) > 1:
                first, second = found[0][0], found[1][0]
                raise BackendError(
                    f"{first} and {second} both implement {hook}; "
                    f"disable one: EVENER_DISABLE_PLUGINS={second.distribution}"
                )
            for package, value in found:
                return Provided(value, package.name, package.distribution, package.version)
        return None


def _module(package: Package) -> ModuleType:
    """The module with the package's hooks; an empty one for a package that has only lazy imports."""
    path = package.descriptor.module
    if path is None:
        return ModuleType(package.key)
    try:
        return importlib.import_module(path)
    except EvenerError:
        raise
    except Exception as cause:  # a package may raise anything; the cause is kept
        raise DescriptorError(
            f"{package}: importing its module {path} failed with {describe_exception(path, cause)}; "
            f"reinstall {package.distribution}, fix it if it is yours, "
            f"or disable it with EVENER_DISABLE_PLUGINS={package.distribution}"
        ) from cause


class PluginRegistry:
    """The registered packages and what they deliver; one for each run."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._packages: dict[str, Package] = {}
        self._options: dict[str, Mapping[str, Any]] = {}
        self._implemented: dict[str, frozenset[str]] = {}
        self._owners: dict[tuple[str, str], Package] = {}
        self._delivered: dict[str, tuple[Provided[Any], ...]] = dict.fromkeys(_AT_REGISTRATION, ())

    @property
    def packages(self) -> tuple[Package, ...]:
        """The registered packages, in the order of their registration."""
        return tuple(self._packages.values())

    def register(self, package: Package, module: ModuleType, options: Mapping[str, Any]) -> None:
        """Check ``module``'s hooks, register it, and call those that need no device. On an error nothing is changed.

        Args:
            package: whose module it is.
            module: the imported module that the descriptor names.
            options: the package's own, checked.

        Raises:
            HookError: a hook is misspelt, unmarked, lacks an argument, or raised.
            DescriptorError: the delivered plugins differ from the announced ones.
            DuplicateNameError: another package delivers the same name, or this one is registered already.
        """
        if package.key in self._packages:
            raise DuplicateNameError(
                package.noun, package.name, self._packages[package.key].distribution, package.distribution
            )
        implemented = check_hooks(package, module)
        try:
            self._add(package, module)
            new = {hook: self._ask(hook, package, {}) if hook in implemented else () for hook in _AT_REGISTRATION}
            owned = self._claims(package, new)
        except BaseException:
            if self._manager.has_plugin(package.key):
                self._manager.unregister(name=package.key)
            raise
        self._packages[package.key] = package
        self._options[package.key] = options
        self._implemented[package.key] = implemented
        self._owners.update(owned)
        for hook, values in new.items():
            self._delivered[hook] += values

    def delivered(self, hook: str) -> tuple[Provided[Any], ...]:
        """What every package delivered through a hook that takes no device."""
        return self._delivered[hook]

    def collect(self, hook: str, packages: Iterable[Package], device: Any) -> tuple[Provided[Any], ...]:
        """Call ``hook`` of ``packages`` for ``device``; each must deliver what its descriptor announces."""
        found: list[Provided[Any]] = []
        for package in packages:
            if hook in self._implemented[package.key]:
                found += self._ask(hook, package, {"device": device, "options": self._options[package.key]})
        return tuple(found)

    def first(self, hook: str, package: Package, **arguments: Any) -> Any | None:
        """The one object that ``package`` returns from ``hook``; None if it does not implement it or declines."""
        if hook not in self._implemented[package.key]:
            return None
        return self._call(hook, package, {**arguments, "options": self._options[package.key]})

    def _add(self, package: Package, module: ModuleType) -> None:
        holder = self._manager.get_name(module)
        if holder is not None:
            raise DescriptorError(
                f"{package} names the module {module.__name__}, which {holder} registered already; "
                "give each package a module of its own"
            )
        try:
            self._manager.register(module, name=package.key)
            self._manager.check_pending()
        except (ValueError, pluggy.PluginValidationError) as cause:
            raise HookError(f"{package}: {module.__name__} cannot be registered: {cause}") from cause

    def _call(self, hook: str, package: Package, arguments: Mapping[str, Any]) -> Any:
        """Run one package's implementation."""
        others = [plugin for name, plugin in self._manager.list_name_plugin() if name != package.key]
        caller = self._manager.subset_hook_caller(hook, others)
        try:
            result = caller(**arguments)
        except EvenerError:
            raise
        except Exception as cause:  # a package may raise anything; the cause is kept
            raise HookError(
                f"{package}: {hook} raised {describe_exception(package.descriptor.module or '', cause)}"
            ) from cause
        if caller.spec is not None and caller.spec.opts["firstresult"]:
            return result
        return result[0] if result else None

    def _ask(self, hook: str, package: Package, arguments: Mapping[str, Any]) -> tuple[Provided[Any], ...]:
        """The objects that one package delivers, compared with what it announces."""
        values = self._call(hook, package, arguments)
        if not isinstance(values, (list, tuple)):
            raise HookError(f"{package}: {hook} returned {values!r}; it returns a list or a tuple")
        _, what, attribute = ANNOUNCED[hook]
        for value in values:
            check_delivered(package, hook, value)
        names = [getattr(value, attribute) for value in values]
        self._check_agreement(hook, package, set(names))
        if hook != "evener_kernels" and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DuplicateNameError(what, twice, package.distribution, package.distribution)
        return tuple(Provided(value, package.name, package.distribution, package.version) for value in values)

    def _check_agreement(self, hook: str, package: Package, delivered: set[str]) -> None:
        """A package delivers exactly the names that it announces.

        Raises:
            DescriptorError: it does not; the message names every difference.
        """
        field, what, _ = ANNOUNCED[hook]
        announced = set(getattr(package.descriptor, field))
        faults = [f"announces {what} {name!r} but does not deliver it" for name in sorted(announced - delivered)]
        faults += [f"delivers {what} {name!r} but does not announce it" for name in sorted(delivered - announced)]
        if not faults:
            return
        known = {each.value.name for each in self._delivered["evener_op_schemas"]} if field == "ops" else set()
        near = ((name, did_you_mean(name, known)) for name in sorted((announced ^ delivered) - known))
        misspelt = "".join(f"; {name!r} is no op{hint}" for name, hint in near if hint.endswith("?"))
        raise DescriptorError(
            f"{package} {', and '.join(faults)}; make `{field}` of its descriptor and {hook} agree{misspelt}"
        )

    def _claims(self, package: Package, new: Mapping[str, tuple[Provided[Any], ...]]) -> dict[tuple[str, str], Package]:
        """The names that ``package`` would own and that ``discover`` does not check: packages of which only one is
        chosen may announce the same.

        Raises:
            DuplicateNameError: another chosen package owns one of them.
        """
        descriptor = package.descriptor
        names = [(ANNOUNCED[hook][1], provided.value.name) for hook, values in new.items() for provided in values]
        names += [("state provider", name) for name in descriptor.states]
        names += [("alias", name) for name in descriptor.aliases]
        for name in names:
            if name in self._owners:
                raise DuplicateNameError(*name, self._owners[name].distribution, package.distribution)
        return dict.fromkeys(names, package)


def options_by_package(
    packages: Iterable[Package], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Every option of every package, by ``Package.key``: the checked value where one is given, else the default.

    Args:
        packages: the chosen packages.
        options: by package name; text is converted to the option's type. Packages of different groups may share a
            name; then each takes the keys that it has.

    Raises:
        UnknownNameError: a name that is not among ``packages``, or a key that no package of that name has.
        ConfigError: a wrong value.
    """
    named: dict[str, list[Package]] = {}
    for package in packages:
        named.setdefault(package.name, []).append(package)
    for name in options:
        if name not in named:
            raise UnknownNameError("package to set options of", name, named, "(only chosen packages take options)")
    checked: dict[str, dict[str, Any]] = {}
    for name, namesakes in named.items():
        given = options.get(name, {})
        known = {key for package in namesakes for key in package.descriptor.options}
        for key in given:
            if key not in known:
                raise UnknownNameError(f"option of {name!r}", key, known)
        for package in namesakes:
            checked[package.key] = {
                key: read(f"{name}.{key}", KeySpec.of_option(option), given[key]) if key in given else option.default
                for key, option in package.descriptor.options.items()
            }
    return checked
