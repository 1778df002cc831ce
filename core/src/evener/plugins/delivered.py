"""Judging what a package's hooks deliver, before anything reads it: a fault is told with its author's file and line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Set
from traceback import walk_tb

from evener.contracts.device import DeviceCapabilities
from evener.errors import HookError, PluginError, did_you_mean
from evener.plugins.catalog import Package

#: What core reads of a delivered object, beside its name, without a default to fall back on.
_READ: Mapping[str, Mapping[str, type]] = {
    "evener_device": {"torch_device": object, "capabilities": DeviceCapabilities},
    "evener_kernels": {"op": str},
    "evener_state_providers": {"layout": str, "kinds": Set},
}
#: What Python says of an argument that a class does not take.
_UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def check_delivered(package: Package, hook: str, value: object) -> None:
    """Check that ``value``, which ``hook`` of ``package`` returned, has what core reads of it.

    Raises:
        HookError: it is a class, or lacks an attribute, or one is of another type.
    """
    fault = "is a class: return an object of it" if inspect.isclass(value) else None
    for attribute, kind in {"name": str, **_READ.get(hook, {})}.items():
        found = getattr(value, attribute, None)
        if fault is None and (found is None or not isinstance(found, kind)):
            fault = f"has no {attribute}" if found is None else f"has {attribute}={found!r}"
            fault += "" if kind is object else f"; set it to a {kind.__name__}"
    if fault:
        raise HookError(f"{package}: {hook} returned {place(value)}, which {fault}")


def judged(asked: object, said: object) -> str | None:
    """``said``, if it is what ``supports`` of a kernel, packing or state provider may return.

    Raises:
        PluginError: it is neither None nor a reason; True is the likely one.
    """
    if said is None or (isinstance(said, str) and said):
        return said
    raise PluginError(f"{place(asked)}: supports returned {said!r}; return None to accept, or a str that says why not")


def place(value: object) -> str:
    """``RmsNorm (…/kernels.py:24)``: the class of ``value``, or ``value`` if it is one, and where it is written; what
    was never in a file is shown itself."""
    made = value if inspect.isclass(value) else type(value)
    try:
        return f"{made.__name__} ({inspect.getsourcefile(made)}:{inspect.getsourcelines(made)[1]})"
    except (OSError, TypeError):  # it was made by `exec`, or is one of the interpreter's own
        return repr(value)


def told(module: str, cause: BaseException) -> str:
    """What the code of ``module``'s package raised, the line of its own that was reached, if any was, and what was
    likely meant."""
    steps = list(walk_tb(cause.__traceback__))
    own = [s for s in steps if str(s[0].f_globals.get("__name__")).partition(".")[0] == module.partition(".")[0]]
    frame, line = (own or steps)[-1]
    text = f"{type(cause).__name__}: {cause}" + f" (at {frame.f_code.co_filename}:{line})" * bool(own)
    unknown = _UNKNOWN.search(str(cause))
    made = {**frame.f_globals, **frame.f_locals}.get(unknown[1]) if unknown else None
    return text + (did_you_mean(unknown[2], inspect.signature(made).parameters) if unknown and made else "")
