"""Checks of the numbers in a request."""

from __future__ import annotations

import math

from evener.errors import RequestError


def check_integer(name: str, value: object, low: int, high: int | None) -> None:
    """Raises RequestError if ``value`` is neither None nor an integer from ``low`` to ``high`` (None: no limit)."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be an integer {limits}, not {value!r}", name)


def check_number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    """Raises RequestError if ``value`` is neither None nor a finite number from ``low`` to ``high``.

    Args:
        open_low: ``low`` itself is refused.
    """
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        limits = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {limits}{f' but not {low:g}' * open_low}, not {value!r}", name)
