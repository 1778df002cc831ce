"""NPU graphs: captures whose attention gets its lengths from the host before each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from evener.backend.torch_device import TorchDevice
from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError


class NpuReplay(Replay):
    """One capture. ``graph``: an NPUGraph that was captured with ``auto_dispatch_capture``; it keeps every call of the
    attention kernel, and submits them again with new lengths."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self) -> None:
        self._graph.replay()

    def update(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        # One entry is for all recorded calls: every group of a step has the same lengths. In a decode step each
        # request adds one token, so the ends of queries stay as they were captured.
        self._graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(kv_lens)}])


class NpuGraphs(GraphCapture):
    """Captures share one memory pool, so replays run one after another."""

    def __init__(self, device: TorchDevice) -> None:
        self._device, self._pool = device, None
        self._held: list[Any] = []

    def capture(self, segment: Callable[[], None]) -> Replay:
        npu = self._device.module
        graph = npu.NPUGraph()
        # After a capture has failed, its pool is not used again.
        pool, self._pool = self._pool or npu.graph_pool_handle(), None
        self._device.synchronize()
        stream = npu.current_stream()
        try:
            with npu.graph(graph, pool=pool, auto_dispatch_capture=True):
                segment()
        except RuntimeError as error:
            npu.set_stream(stream)
            _stop_recording(graph)
            raise EngineError(f"{self._device.name} cannot capture it: {error}") from error
        self._pool, self._held = pool, [*self._held, graph]
        return NpuReplay(graph)

    def release(self) -> None:
        for graph in self._held:
            graph.reset()
        self._held, self._pool = [], None


def _stop_recording(graph: Any) -> None:
    """Leave what torch_npu leaves only after a capture that ended well: the mode that records calls of attention."""
    stack = _get_current_dispatch_mode_stack()
    if stack and stack[-1] is graph.graph_dispatch_mode:
        graph.graph_dispatch_mode.__exit__(None, None, None)
