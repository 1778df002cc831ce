"""Checks of a package's hook implementations before they are registered, and of the objects that they return.

pluggy accepts these mistakes without an error, or ignores the function: no marker, another project's marker, a
misspelt name (``check_pending`` misses one that is marked ``optionalhook``), a missing argument.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Set
from traceback import walk_tb
from types import ModuleType
from typing import Any

from evener.contracts import hooks
from evener.contracts.device import DeviceCapabilities
from evener.contracts.interfaces import INTERFACES
from evener.errors import DescriptorError, HookError, PluginError, did_you_mean
from evener.plugins.catalog import Package

_PREFIX = f"{hooks.PROJECT}_"
_MARK = f"{hooks.PROJECT}_impl"
_SPEC = f"{hooks.PROJECT}_spec"
#: Marker settings that are refused: they change the order or wrap other packages' results, but each package is called
#: alone here.
_REFUSED = ("hookwrapper", "wrapper", "optionalhook", "tryfirst", "trylast")

#: For each hook: the descriptor field that announces its objects, what one of them is called in messages, and the
#: attribute of the object that the descriptor lists.
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
#: Attributes that core reads of a delivered object, beside its name, and that have no default.
_READ: Mapping[str, Mapping[str, type]] = {
    "evener_device": {"torch_device": object, "capabilities": DeviceCapabilities},
    "evener_kernels": {"op": str},
    "evener_state_providers": {"layout": str, "kinds": Set},
}
#: Python's message about an argument that a class does not take.
_UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


#: Every hook and its arguments, read from ``evener.contracts.hooks``.
HOOK_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hooks).items()
    if getattr(function, _SPEC, None) is not None
}


def check_hooks(package: Package, module: ModuleType) -> frozenset[str]:
    """The names of the hooks that ``module`` implements.

    Raises:
        HookError: something in ``module`` looks like a hook but would not be called, or not with all its arguments.
        DescriptorError: the hooks do not fit what the descriptor announces, or the package's group.
    """
    known = HOOK_ARGUMENTS
    implemented: set[str] = set()
    for attribute, value in vars(module).items():
        at = f"{package}: {module.__name__}.{attribute}"
        name = _hook_name(at, attribute, value)
        if name is None:
            continue
        if name not in known:
            raise HookError(f"{at}: evener has no hook {name!r}{did_you_mean(name, known)}")
        if name in implemented:
            raise HookError(f"{at}: {name!r} is implemented twice; keep one")
        _check_arguments(at, value, known[name])
        implemented.add(name)
    _check_announced(package, implemented)
    return frozenset(implemented)


def _hook_name(at: str, attribute: str, value: object) -> str | None:
    """The hook that an attribute implements; None if it is no hook. ``at``: what the attribute is called in errors."""
    looks_like_one = attribute.startswith(_PREFIX) and callable(value) and not inspect.isclass(value)
    marks: dict[str, Any] = getattr(value, "__dict__", {})
    if not inspect.isroutine(value):
        if looks_like_one:
            kind = type(value).__name__
            raise HookError(f"{at} looks like a hook but is a {kind}; make it a plain function marked with @hookimpl")
        return None
    options = marks.get(_MARK)
    if options is None:
        if not looks_like_one or _SPEC in marks:  # the specification itself, imported for its documentation
            return None
        foreign = [mark.removesuffix("_impl") for mark in marks if mark.endswith("_impl")]
        why = f"is marked for project {foreign[0]!r}" if foreign else "has no marker"
        how = "mark it with `from evener.contracts.hooks import hookimpl`"
        raise HookError(f"{at} looks like a hook but {why}; {how}")
    refused = [option for option in _REFUSED if options.get(option)]
    if refused:
        raise HookError(f"{at}: hookimpl({refused[0]}=True) is not allowed; remove it")
    return options.get("specname") or attribute


def _check_arguments(at: str, function: Any, wanted: tuple[str, ...]) -> None:
    """A hook takes every argument, without a default: pluggy does not pass an argument that has one."""
    parameters = inspect.signature(function).parameters.values()
    taken = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    signature = f"its arguments are ({', '.join(wanted)}), without defaults"
    for name in taken:
        if name not in wanted:
            raise HookError(f"{at}: no argument {name!r} is passed; {signature}")
    for name in wanted:
        if name not in taken:
            raise HookError(f"{at} does not take {name!r}; {signature}")


def _check_announced(package: Package, implemented: set[str]) -> None:
    for hook, (field, _, _) in ANNOUNCED.items():
        announced = getattr(package.descriptor, field)
        if announced and hook not in implemented:
            raise DescriptorError(f"{package} announces {field} {announced!r} but does not implement {hook}")
        if hook in implemented and not announced:
            raise DescriptorError(f"{package} implements {hook} but its descriptor announces no {field}")
    for hook, groups in _GROUPS.items():
        if hook in implemented and package.group not in groups:
            raise DescriptorError(f"{package} implements {hook}, which belongs to {' or '.join(groups)}")
        if hook not in implemented and package.group == groups[0]:
            raise DescriptorError(f"{package} must implement {hook}: every entry point in {groups[0]} does")


def check_delivered(package: Package, hook: str, value: object) -> None:
    """Check that ``value``, which ``hook`` of ``package`` returned, has the attributes that core reads.

    Raises:
        HookError: it is a class, or lacks an attribute, or one is of another type.
    """
    fault = "is a class: return an object of it" if inspect.isclass(value) else None
    for attribute, kind in {"name": str, **_READ.get(hook, {})}.items():
        found = getattr(value, attribute, None)
        if fault is None and (found is None or not isinstance(found, kind)):
            fault = f"has no {attribute}" if found is None else f"has {attribute}={found!r}"
            fault += "" if kind is object else f"; set it to a {kind.__name__}"
    if fault is None and hook == "evener_state_providers":
        fault = _missing_interface(value)
    if fault:
        raise HookError(f"{package}: {hook} returned {describe_type(value)}, which {fault}")


def _missing_interface(provider: Any) -> str | None:
    for kind, interface in INTERFACES.items():
        if kind in provider.kinds and not isinstance(provider, interface):
            name = interface.__name__
            return f"serves state of kind {kind!r} but is no {name}; subclass evener.contracts.state.{name}"
    return None


def check_supports(asked: object, said: object) -> str | None:
    """Check ``said``, the answer of ``asked.supports`` (a kernel, packing or state provider), and return it.

    Raises:
        PluginError: it is neither None nor a reason; a common mistake is True.
    """
    if said is None or (isinstance(said, str) and said):
        return said
    raise PluginError(
        f"{describe_type(asked)}: supports returned {said!r}; return None to accept, or a str with the reason to refuse"
    )


def describe_type(value: object) -> str:
    """``RmsNorm (…/kernels.py:24)``: the class of ``value``, or ``value`` if it is a class, and where its source is;
    ``repr(value)`` if it has no source file."""
    made = value if inspect.isclass(value) else type(value)
    try:
        return f"{made.__name__} ({inspect.getsourcefile(made)}:{inspect.getsourcelines(made)[1]})"
    except (OSError, TypeError):  # it was made by `exec`, or is one of the interpreter's own
        return repr(value)


def describe_exception(module: str, cause: BaseException) -> str:
    """The exception that ``module``'s package raised, the last line of that package that was reached, and the argument
    that was probably meant if one is unknown."""
    steps = list(walk_tb(cause.__traceback__))
    own = [s for s in steps if str(s[0].f_globals.get("__name__")).partition(".")[0] == module.partition(".")[0]]
    frame, line = (own or steps)[-1]
    text = f"{type(cause).__name__}: {cause}" + f" (at {frame.f_code.co_filename}:{line})" * bool(own)
    unknown = _UNKNOWN.search(str(cause))
    made = {**frame.f_globals, **frame.f_locals}.get(unknown[1]) if unknown else None
    return text + (did_you_mean(unknown[2], inspect.signature(made).parameters) if unknown and made else "")
