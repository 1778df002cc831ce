"""Attribution: an exception of a package's kernel or state provider is reported with the package's name. Torch-free.

Calls become no slower: the traceback is compared with the registered callables only after something was raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import Any

from evener.errors import EvenerError, PluginError
from evener.plugins.catalog import Provided


class Attribution:
    """Which package made each callable of a model's call sites."""

    def __init__(self, states: Sequence[Provided[Any]]) -> None:
        self._by_code: dict[CodeType, dict[str, Provided[Any]]] = {}
        self._states = {id(candidate.value): candidate for candidate in states}

    def register(self, candidate: Provided[Any], function: Any) -> None:
        """Remember that the kernel ``candidate`` built ``function``."""
        while isinstance(function, partial):
            function = function.func
        function = inspect.unwrap(function)
        for made in (function, getattr(function, "__func__", None), type(function).__call__):
            if isinstance(code := getattr(made, "__code__", None), CodeType):
                self._by_code.setdefault(code, {})[candidate.label] = candidate

    def raise_attributed(self, error: Exception) -> None:
        """Raise ``error`` with the name of the innermost kernel or state provider in its traceback; return if there is
        none, or if ``error`` is an ``EvenerError``.

        Raises:
            PluginError: with the provider's name and the option that runs without it.
        """
        for frame, line in [] if isinstance(error, EvenerError) else reversed(list(walk_tb(error.__traceback__))):
            state = self._states.get(id(frame.f_locals.get("self")))
            candidates = [state] if state else list(self._by_code.get(frame.f_code, {}).values())
            if candidates:
                where = f"{frame.f_code.co_filename}:{line}, in a step; the traceback has more, for its author"
                raise _provider_error(candidates, error, where) from error


@contextmanager
def attributed_errors(candidate: Provided[Any]) -> Iterator[None]:
    """Within the block, an exception is raised as a ``PluginError`` that names ``candidate``."""
    try:
        yield
    except EvenerError:
        raise
    except Exception as error:
        raise _provider_error(
            [candidate], error, "start; EVENER_DEBUG=1 shows the traceback, for its author"
        ) from error


def _provider_error(candidates: Sequence[Provided[Any]], error: Exception, where: str) -> PluginError:
    ops = dict.fromkeys(getattr(candidate.value, "op", "attention") for candidate in candidates)
    kind = "state provider" if "attention" in ops else "kernel"
    who = " or ".join(f"{candidate.label} {candidate.version}" for candidate in candidates)
    without = " ".join(f"ops.{op}=reference" for op in ops)
    return PluginError(
        f"{kind} {who} raised {type(error).__name__}: {error}; {without} runs without it; it happened at {where}"
    )
