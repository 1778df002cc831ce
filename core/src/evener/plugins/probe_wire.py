"""A probe's result as plain data, for the pipe from the child and for the cache."""

from __future__ import annotations

from typing import Any

from evener.contracts.probe import ProbedDevice, ProbeResult


def encode(result: object) -> dict[str, Any]:
    """``result`` as JSON-able data.

    Raises:
        TypeError: it is no ``ProbeResult``, or a field of it has the wrong type.
    """
    if not isinstance(result, ProbeResult):
        raise TypeError(f"probe() returned {result!r}, not a ProbeResult")
    data = {
        "score": result.score,
        "devices": [{"index": each.index, "name": each.name, "memory": each.memory} for each in result.devices],
        "reasons": list(result.reasons),
    }
    decode(data)
    return data


def decode(data: Any) -> ProbeResult:
    """The result that ``encode`` wrote.

    Raises:
        TypeError: ``data`` was not written by ``encode``.
    """
    try:
        score, devices, reasons = data["score"], data["devices"], data["reasons"]
        fields = [(each["index"], each["name"], each["memory"]) for each in devices]
    except (KeyError, TypeError) as cause:
        raise TypeError(f"not a probe's result: {data!r}") from cause
    if type(score) is not int or score < 0:
        raise TypeError(f"a probe's score is a whole number, 0 or more, not {score!r}")
    if not all(type(index) is int and isinstance(name, str) and type(memory) is int for index, name, memory in fields):
        raise TypeError(f"a probed device has an int index, a text name and int bytes of memory, not {devices!r}")
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise TypeError(f"a probe's reasons are a tuple of text, not {reasons!r}")
    return ProbeResult(score, tuple(ProbedDevice(*each) for each in fields), tuple(reasons))
