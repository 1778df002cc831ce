"""Whose code raised: what a stranger's kernel or state provider throws is said to be its. Torch-free.

Calls pay nothing for it: only when something was raised is its traceback compared with who made what.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, Any

from evener.errors import EvenerError, PluginError

if TYPE_CHECKING:
    from evener.resolution.resolver import Offer


class Makers:
    """Who made the callables of a model's call sites."""

    def __init__(self, states: Sequence[Offer]) -> None:
        self._by_code: dict[CodeType, dict[str, Offer]] = {}
        self._states = {id(offer.value): offer for offer in states}

    def note(self, offer: Offer, function: Any) -> None:
        """Remember that a kernel built ``function``."""
        while isinstance(function, partial):
            function = function.func
        function = inspect.unwrap(function)
        for made in (function, getattr(function, "__func__", None), type(function).__call__):
            if isinstance(code := getattr(made, "__code__", None), CodeType):
                self._by_code.setdefault(code, {})[offer.label] = offer

    def blame(self, error: Exception) -> None:
        """Raise ``error`` as that of the innermost kernel or state provider that it came through, if there is one.

        Raises:
            PluginError: there is one, and it raised no error of ours.
        """
        for frame, line in [] if isinstance(error, EvenerError) else reversed(list(walk_tb(error.__traceback__))):
            state = self._states.get(id(frame.f_locals.get("self")))
            offers = [state] if state else list(self._by_code.get(frame.f_code, {}).values())
            if offers:
                where = f"{frame.f_code.co_filename}:{line}, in a step; the traceback says more, to its author"
                raise _accusation(offers, error, where) from error


@contextmanager
def blamed(offer: Offer) -> Iterator[None]:
    """Whatever ``offer`` raises while a model is resolved is said to be its."""
    try:
        yield
    except EvenerError:
        raise
    except Exception as error:
        raise _accusation([offer], error, "start; EVENER_DEBUG=1 shows where, for its author") from error


def _accusation(offers: Sequence[Offer], error: Exception, where: str) -> PluginError:
    ops = dict.fromkeys(getattr(offer.value, "op", "attention") for offer in offers)
    kind = "state provider" if "attention" in ops else "kernel"
    who = " or ".join(f"{offer.label} {offer.version}" for offer in offers)
    without = " ".join(f"ops.{op}=reference" for op in ops)
    return PluginError(
        f"{kind} {who} raised {type(error).__name__}: {error}; {without} runs without it; it happened at {where}"
    )
