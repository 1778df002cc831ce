"""Capturing steps with a graph class that has torch's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evener.backend.torch_device import TorchDevice
from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError


class _TorchReplay(Replay):
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self) -> None:
        self._graph.replay()


class TorchGraphs(GraphCapture):
    """Captures with a graph class that has torch's methods (``capture_begin``, ``capture_end``, ``replay``). All
    captures share one memory pool, so replays must run one after another.

    Args:
        graph: makes an empty graph.
        pool: makes the handle of a memory pool.
    """

    def __init__(self, device: TorchDevice, graph: Callable[[], Any], pool: Callable[[], Any]) -> None:
        self._device, self._graph, self._pool = device, graph, pool
        self._stream, self._shared_pool = device.new_stream(), None
        self._held: list[Any] = []

    def capture(self, segment: Callable[[], None]) -> Replay:
        module, graph = self._device.module, self._graph()
        # After a capture has failed, torch refuses further captures into its pool: the next ones get a new pool.
        pool, self._shared_pool = self._shared_pool or self._pool(), None
        self._device.synchronize()
        try:
            with module.stream(self._stream):
                graph.capture_begin(pool=pool)
                try:
                    segment()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise EngineError(f"{self._device.name} cannot capture it: {error}") from error
        self._shared_pool, self._held = pool, [*self._held, graph]
        return _TorchReplay(graph)

    def release(self) -> None:
        for graph in self._held:
            graph.reset()
        self._held, self._shared_pool = [], None  # torch cannot reuse a pool after all its captures are released
