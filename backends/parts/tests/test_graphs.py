"""``TorchGraphs``, with a stand-in for the torch namespace and graphs of an accelerator."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from evener.errors import EngineError
from evener_backend_parts.graphs import PieceGraphs, TorchGraphs


class Graph:
    """Replays a captured function; ``said`` records the calls it received."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.said = fails, []  # type: bool, list[Any]

    def capture_begin(self, pool: Any) -> None:
        self.said.append(("begin", pool))

    def capture_end(self) -> None:
        self.said.append("end")
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        self.said.append("replay")

    def reset(self) -> None:
        self.said.append("reset")


def graphs(made: list[Graph], fails: bool = False, kind: type[TorchGraphs] = TorchGraphs) -> Any:
    def make() -> Graph:
        made.append(Graph(fails))
        return made[-1]

    device: Any = SimpleNamespace(
        name="a device", synchronize=lambda: None, new_stream=lambda: "a stream",
        module=SimpleNamespace(stream=lambda stream: nullcontext()),
    )  # fmt: skip
    pools = count(1)
    return kind(device, make, lambda: f"pool {next(pools)}")


def test_captures_share_a_pool_until_they_are_released_and_no_later_one_uses_it_L3() -> None:
    made: list[Graph] = []
    capture, ran = graphs(made), []
    for number in range(4):
        capture.capture(lambda number=number: ran.append(number))()  # type: ignore[misc]
        if number % 2:
            capture.release()
    assert ran == [0, 1, 2, 3]
    pools = ("pool 1", "pool 1", "pool 2", "pool 2")
    assert [g.said for g in made] == [[("begin", pool), "end", "replay", "reset"] for pool in pools]


def test_a_capture_failure_is_an_engine_error_with_the_cause_L3() -> None:
    with pytest.raises(EngineError, match="a device cannot capture it: operation not permitted"):
        graphs([], fails=True).capture(lambda: None)


def test_a_failed_capture_does_not_reuse_its_pool_L3() -> None:
    made: list[Graph] = []
    capture = graphs(made)
    capture.capture(lambda: None)
    with pytest.raises(EngineError, match="stream is capturing"):
        capture.capture(lambda: setattr(made[-1], "fails", True))
    for _ in range(2):
        capture.capture(lambda: None)
    assert [graph.said[0][1] for graph in made] == ["pool 1", "pool 1", "pool 2", "pool 2"]


def test_an_error_in_the_segment_ends_the_capture_L3() -> None:
    made: list[Graph] = []

    def segment() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        graphs(made).capture(segment)
    assert made[0].said[-1] == "end"


def test_what_is_left_out_is_called_between_the_pieces_of_each_replay_L3() -> None:
    made: list[Graph] = []
    capture, ran = graphs(made, kind=PieceGraphs), list[str]()

    def segment() -> None:
        capture.leave_out(lambda: ran.append(f"first behind {[g.said[-1] for g in made]}"))
        capture.leave_out(lambda: ran.append(f"second behind {[g.said[-1] for g in made]}"))

    replay = capture.capture(segment)
    assert not ran and [g.said for g in made] == [[("begin", "pool 1"), "end"]] * 3
    replay()
    assert ran == ["first behind ['replay', 'end', 'end']", "second behind ['replay', 'replay', 'end']"]
    assert [g.said[-1] for g in made] == ["replay"] * 3
    capture.capture(lambda: None)()
    assert made[-1].said == [("begin", "pool 1"), "end", "replay"] and len(ran) == 2
    capture.release()
    assert [g.said[-1] for g in made] == ["reset"] * 4


def test_a_piece_that_cannot_be_captured_fails_the_capture_L3() -> None:
    made: list[Graph] = []
    capture = graphs(made, kind=PieceGraphs)

    def segment() -> None:
        made[-1].fails = True
        capture.leave_out(lambda: None)

    with pytest.raises(EngineError, match="a device cannot capture it: operation not permitted"):
        capture.capture(segment)
    assert made[0].said == [("begin", "pool 1"), "end"] and len(made) == 1
    capture.capture(lambda: capture.leave_out(lambda: None))()
    assert [g.said for g in made[1:]] == [[("begin", "pool 2"), "end", "replay"]] * 2
