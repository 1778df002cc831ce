"""A probe's result as plain data, for the pipe from the child and for the cache."""

from __future__ import annotations

from typing import Any

import msgspec

from evener.contracts.probe import ProbeResult


def encode(result: object) -> dict[str, Any]:
    """``result`` as JSON-able data.

    Raises:
        TypeError: it is no ``ProbeResult``, or a field of it has the wrong type.
    """
    if not isinstance(result, ProbeResult):
        raise TypeError(f"probe() returned {result!r}, not a ProbeResult")
    data: dict[str, Any] = msgspec.to_builtins(result)
    decode(data)
    return data


def decode(data: Any) -> ProbeResult:
    """The result that ``encode`` wrote.

    Raises:
        TypeError: ``data`` was not written by ``encode``.
    """
    try:
        result = msgspec.convert(data, ProbeResult)
    except msgspec.ValidationError as cause:
        raise TypeError(f"no ProbeResult with fields of the right types: {cause}") from cause
    if result.score < 0:
        raise TypeError(f"a probe's score is a whole number, 0 or more, not {result.score}")
    return result
