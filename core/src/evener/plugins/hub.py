"""Registration: pluggy behind our own checks, with all or nothing for each package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

import pluggy

from evener.contracts import hooks
from evener.errors import DescriptorError, DuplicateNameError, EvenerError, HookError, did_you_mean
from evener.plugins.catalog import Package
from evener.plugins.delivered import check_delivered, told
from evener.plugins.hook_check import ANNOUNCED, check_hooks

T = TypeVar("T")

#: Hooks without arguments: asked once, when the package is registered.
_AT_REGISTRATION = ("evener_op_schemas", "evener_state_kinds", "evener_quant_schemes")


@dataclass(frozen=True)
class Provided(Generic[T]):
    """An object that a package delivered: ``value``, and where it came from."""

    value: T
    package: str
    distribution: str
    version: str


class Hub:
    """The registered packages and what they deliver. One a run; ``register`` either succeeds or changes nothing."""

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
        """Check ``module``'s hooks, register it, and ask it for everything that needs no device.

        Args:
            package: whose module it is.
            module: the imported module that the descriptor names.
            options: the package's own, checked.

        Raises:
            HookError: a hook is misspelt, unmarked, lacks an argument, or raised.
            DescriptorError: what is delivered differs from what is announced.
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
        """Ask ``packages`` for what they deliver on ``device``; each must deliver what its descriptor announces."""
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
                f"{package} names the module {module.__name__}, which {holder} registered already; give it its own"
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
        except Exception as cause:  # a stranger's function; the cause is kept
            raise HookError(f"{package}: {hook} raised {told(package.descriptor.module or '', cause)}") from cause
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
        """Everything that one package announces and does not deliver, or the other way round, is an error."""
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
        """The names that ``package`` would own, unless somebody does already: those that may stand twice in a catalog,
        for ``discover`` sees to the others."""
        descriptor = package.descriptor
        names = [(ANNOUNCED[hook][1], provided.value.name) for hook, values in new.items() for provided in values]
        names += [("state provider", name) for name in descriptor.states]
        names += [("alias", name) for name in descriptor.aliases]
        for name in names:
            if name in self._owners:
                raise DuplicateNameError(*name, self._owners[name].distribution, package.distribution)
        return dict.fromkeys(names, package)
