"""The recording capture is as strict as a device's graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from evener.contracts.graph import Replay
from evener.errors import EngineError
from evener_conformance.graph.record import RecordingCapture


def captured(segment: Callable[[], object], needs_update: bool = False) -> Replay:
    def run() -> None:
        segment()

    return RecordingCapture(None, needs_update).capture(run)


def test_a_replay_reads_its_buffers_anew_and_writes_to_the_same_addresses() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.zeros(2)
    where = y.data_ptr()
    replay = captured(lambda: y.copy_((x * 2).exp() + x[1:]))
    for values in ([0.0, 1.0], [3.0, -1.0]):
        x.copy_(torch.tensor(values))
        replay()
        torch.testing.assert_close(y, (x * 2).exp() + x[1:])
    assert y.data_ptr() == where


def test_capturing_computes_nothing() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    captured(lambda: y.copy_(x + 1))
    kept = RecordingCapture(None, False)
    kept.capture(lambda: None)
    made: list[torch.Tensor] = []
    replay = kept.capture(lambda: made.append(x + 1))
    assert made[0].isnan().all()
    replay()
    assert made[0].tolist() == [2.0, 2.0]


def test_a_number_from_the_host_is_fixed_by_the_capture() -> None:
    x, y, factor = torch.ones(2), torch.zeros(2), [2.0]
    replay = captured(lambda: y.copy_(x * factor[0]))
    factor[0] = 5.0
    replay()
    assert y.tolist() == [2.0, 2.0]


def test_reading_a_value_on_the_host_cannot_be_captured() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    with pytest.raises(EngineError, match="reads a value on the host"):
        captured(lambda: y.fill_(x.sum().item()))
    with pytest.raises(EngineError, match="reads a value on the host"):
        captured(lambda: y.copy_(x[x > 0]))


def test_memory_that_was_freed_since_capture_is_an_error() -> None:
    y = torch.zeros(2)

    def capture() -> Replay:
        mortal = torch.ones(2)
        return captured(lambda: y.add_(mortal))

    replay = capture()
    with pytest.raises(EngineError, match=r"freed since capture: torch\.float32 torch\.Size\(\[2\]\)"):
        replay()


def test_a_buffer_that_moved_is_an_error() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    replay = captured(lambda: y.copy_(x))
    x.untyped_storage().resize_(1 << 22)
    with pytest.raises(EngineError, match="moved since capture"):
        replay()


def test_a_replay_without_the_update_it_needs_is_an_error() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    replay = captured(lambda: y.copy_(x), needs_update=True)
    with pytest.raises(EngineError, match="need an update before each run"):
        replay()
    replay.update([], [])
    replay()
    with pytest.raises(EngineError, match="need an update before each run"):
        replay()


def test_a_capture_beyond_the_limit_is_an_error() -> None:
    capture = RecordingCapture(2, False)
    for _ in range(2):
        capture.capture(lambda: None)
    with pytest.raises(EngineError, match="holds 2 captures at once"):
        capture.capture(lambda: None)
    capture.release()
    capture.capture(lambda: None)
