"""Captures over a stand-in for torch_npu's graph classes. Level L0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from evener.errors import EngineError
from evener_backend_ascend.graph import NpuGraphs


class Graph:
    """What ``torch.npu.NPUGraph`` has."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.auto_dispatch_capture = False

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        # The real class refuses otherwise.
        assert self.auto_dispatch_capture
        self.log.append(cpu_update_input)


@pytest.fixture
def device() -> Any:
    pools = iter(range(10))
    npu = SimpleNamespace(made=[], pools=[], streams=[])

    def make() -> Graph:
        npu.made.append(Graph())
        graph: Graph = npu.made[-1]
        return graph

    @contextmanager
    def capturing(graph: Graph, pool: Any, auto_dispatch_capture: bool) -> Iterator[None]:
        graph.auto_dispatch_capture = auto_dispatch_capture
        npu.pools.append(pool)
        yield

    npu.NPUGraph, npu.graph, npu.graph_pool_handle = make, capturing, lambda: f"pool {next(pools)}"
    npu.current_stream, npu.set_stream = lambda: "main", npu.streams.append
    return SimpleNamespace(module=npu, name="npu 0", synchronize=lambda: None)


def test_the_lengths_of_each_step_are_updated_before_its_replay_L0(device: Any) -> None:
    replay = NpuGraphs(device).capture(lambda: None)
    for lengths in ([5, 9], [6, 10]):
        replay.update([1, 1], lengths)
        replay()
    first, second = ([{"actual_seq_lengths_kv": n}] for n in ([5, 9], [6, 10]))
    assert device.module.made[0].log == [first, "replay", second, "replay"]


def test_captures_share_a_pool_until_one_fails_L0(device: Any) -> None:
    graphs = NpuGraphs(device)

    def fail() -> None:
        raise RuntimeError("stream resources are used up")

    graphs.capture(lambda: None)
    graphs.capture(lambda: None)
    with pytest.raises(EngineError, match="npu 0 cannot capture it: stream resources are used up"):
        graphs.capture(fail)
    graphs.capture(lambda: None)
    assert device.module.streams == ["main"], "a failed capture gives the stream back"
    assert device.module.pools == ["pool 0", "pool 0", "pool 0", "pool 1"]
    graphs.release()
    assert [graph.log for graph in device.module.made] == [["reset"], ["reset"], [], ["reset"]]
