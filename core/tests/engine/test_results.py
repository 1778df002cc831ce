"""Results are copied on a stream of their own where the device has streams and events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.contracts.device import ReadyReadback
from evener.engine.sampling.results import Results
from evener_conformance.reference.device import HostDevice


class _Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._log.append("enter")

    def __exit__(self, *error: object) -> None:
        self._log.append("leave")


class _Event:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self) -> None:
        self._log.append("record")

    def wait(self) -> None:
        self._log.append("wait")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("events", [False, True])
def test_a_result_is_read_aside_only_where_there_are_streams_and_events(
    streams: bool, events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    device = HostDevice(0)

    def readback(tensor: torch.Tensor) -> ReadyReadback:
        log.append("copy")
        return ReadyReadback(tensor.clone())

    made: dict[str, Any] = {"new_stream": _Stream, "new_event": _Event}
    for name, there in (("new_stream", streams), ("new_event", events)):
        if there:
            monkeypatch.setattr(device, name, lambda kind=made[name]: kind(log))
    monkeypatch.setattr(device, "readback", readback)
    read = Results(device).read(torch.tensor([3, 4]))
    aside = ["record", "enter", "wait", "copy", "leave"]
    assert log == (aside if streams and events else ["copy"])
    assert read.ready() and read.wait().tolist() == [3, 4]
