"""Judging a package's hook implementations before they are registered.

pluggy registers in silence, or not at all, what these checks refuse: a function without marker or with another
project's, a misspelt name (``check_pending`` misses one that is marked ``optionalhook``), an argument left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from evener.contracts import hooks
from evener.errors import DescriptorError, HookError, did_you_mean
from evener.plugins.catalog import Package

_PREFIX = f"{hooks.PROJECT}_"
_MARK = f"{hooks.PROJECT}_impl"
_SPEC = f"{hooks.PROJECT}_spec"
#: Settings of the marker that change order or wrap other packages' results; hooks here are asked one package at a time.
_REFUSED = ("hookwrapper", "wrapper", "optionalhook", "tryfirst", "trylast")

#: The field of the descriptor that announces what a hook delivers, what one of it is called, and which of its
#: attributes is announced.
ANNOUNCED: Mapping[str, tuple[str, str, str]] = {
    "evener_kernels": ("ops", "op with kernels", "op"),
    "evener_op_schemas": ("op_schemas", "op", "name"),
    "evener_state_providers": ("states", "state provider", "name"),
    "evener_state_kinds": ("state_kinds", "state kind", "name"),
    "evener_quant_schemes": ("formats", "quantization scheme", "name"),
}
#: Hooks that only packages of some groups may implement.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "evener_device": ("evener.backends",),
    "evener_communicator": ("evener.collectives", "evener.backends"),
    "evener_graph_capture": ("evener.graphs", "evener.backends"),
}


def specified() -> dict[str, tuple[str, ...]]:
    """Every hook and its arguments, read from ``evener.contracts.hooks``."""
    return {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(hooks).items()
        if getattr(function, _SPEC, None) is not None
    }


def check_hooks(package: Package, module: ModuleType) -> frozenset[str]:
    """The names of the hooks that ``module`` implements.

    Raises:
        HookError: something in ``module`` looks like a hook and would never be called, or not as its author means.
        DescriptorError: the hooks do not fit what the descriptor announces, or the package's group.
    """
    known = specified()
    implemented: set[str] = set()
    for attribute, value in vars(module).items():
        name = _hook_name(package, module, attribute, value)
        if name is None:
            continue
        if name not in known:
            raise HookError(
                f"{_at(package, module, attribute)}: evener has no hook {name!r}{did_you_mean(name, known)}"
            )
        if name in implemented:
            raise HookError(f"{_at(package, module, attribute)}: {name!r} is implemented twice; keep one")
        _check_arguments(package, module, attribute, value, known[name])
        implemented.add(name)
    _check_announced(package, implemented)
    return frozenset(implemented)


def _at(package: Package, module: ModuleType, attribute: str) -> str:
    return f"{package}: {module.__name__}.{attribute}"


def _hook_name(package: Package, module: ModuleType, attribute: str, value: object) -> str | None:
    """The hook that an attribute implements; None if it is no hook."""
    looks_like_one = attribute.startswith(_PREFIX) and callable(value) and not inspect.isclass(value)
    marks: dict[str, Any] = getattr(value, "__dict__", {})
    if not inspect.isroutine(value):
        if looks_like_one:
            raise HookError(
                f"{_at(package, module, attribute)} looks like a hook but is a {type(value).__name__}; "
                f"make it a plain function marked with @hookimpl"
            )
        return None
    options = marks.get(_MARK)
    if options is None:
        if not looks_like_one or _SPEC in marks:  # the specification itself, imported for its documentation
            return None
        foreign = [mark.removesuffix("_impl") for mark in marks if mark.endswith("_impl")]
        why = f"is marked for project {foreign[0]!r}" if foreign else "has no marker"
        raise HookError(
            f"{_at(package, module, attribute)} looks like a hook but {why}; "
            f"mark it with `from evener.contracts.hooks import hookimpl`"
        )
    refused = [option for option in _REFUSED if options.get(option)]
    if refused:
        raise HookError(f"{_at(package, module, attribute)}: hookimpl({refused[0]}=True) is not allowed; remove it")
    return options.get("specname") or attribute


def _check_arguments(
    package: Package, module: ModuleType, attribute: str, function: Any, wanted: tuple[str, ...]
) -> None:
    """pluggy passes arguments by name, leaves out those that have a default, and may leave out any."""
    parameters = inspect.signature(function).parameters.values()
    taken = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    signature = f"its arguments are ({', '.join(wanted)}), without defaults"
    for name in taken:
        if name not in wanted:
            raise HookError(f"{_at(package, module, attribute)}: no argument {name!r} is passed; {signature}")
    for name in wanted:
        if name not in taken:
            raise HookError(f"{_at(package, module, attribute)} does not take {name!r}; {signature}")


def _check_announced(package: Package, implemented: set[str]) -> None:
    for hook, (field, _, _) in ANNOUNCED.items():
        announced = getattr(package.descriptor, field)
        if announced and hook not in implemented:
            raise DescriptorError(f"{package} announces {field} {announced!r} but does not implement {hook}")
        if hook in implemented and not announced:
            raise DescriptorError(f"{package} implements {hook} but its descriptor announces no {field}")
    for hook, groups in _GROUPS.items():
        if hook in implemented and package.group not in groups:
            raise DescriptorError(f"{package} implements {hook}, which belongs into {' or '.join(groups)}")
        if hook not in implemented and package.group == groups[0]:
            raise DescriptorError(f"{package} must implement {hook}: it is what {groups[0]} is for")
