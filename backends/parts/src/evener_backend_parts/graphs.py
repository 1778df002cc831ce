"""Capturing steps with a graph class that has torch's methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evener.backend.torch_device import TorchDevice
from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError


class TorchReplay(Replay):
    """One capture; ``graph`` holds it."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def __call__(self) -> None:
        self.graph.replay()


class TorchGraphs(GraphCapture):
    """Captures with a graph class that has torch's methods (``capture_begin``, ``capture_end``, ``replay``, ``reset``).
    All captures share one memory pool, so replays must run one after another.

    A subclass may record in another way (``record``), and make another ``replay`` of a graph.

    Args:
        graph: makes an empty graph.
        pool: makes the handle of a memory pool.
        begin: further arguments of ``capture_begin``.
    """

    replay: type[TorchReplay] = TorchReplay

    def __init__(self, device: TorchDevice, graph: Callable[[], Any], pool: Callable[[], Any], **begin: Any) -> None:
        self.device, self._graph, self._pool, self._begin = device, graph, pool, begin
        self._stream: Any = None
        self._shared_pool: Any = None
        self._held: list[Any] = []

    def capture(self, segment: Callable[[], None]) -> Replay:
        graph = self._graph()
        # After a capture has failed, torch refuses further captures into its pool: the next ones get a new pool.
        pool, self._shared_pool = self._shared_pool or self._pool(), None
        self.device.synchronize()
        try:
            self.record(graph, pool, segment)
        except RuntimeError as error:
            raise EngineError(f"{self.device.name} cannot capture it: {error}") from error
        self._shared_pool, self._held = pool, [*self._held, graph]
        return self.replay(graph)

    def record(self, graph: Any, pool: Any, segment: Callable[[], None]) -> None:
        """Run ``segment`` while ``graph`` records it, with memory of ``pool``.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        self._stream = self._stream or self.device.new_stream()
        with self.device.module.stream(self._stream):
            graph.capture_begin(pool=pool, **self._begin)
            try:
                segment()
            finally:
                graph.capture_end()

    def release(self) -> None:
        for graph in self._held:
            graph.reset()
        self._held, self._shared_pool = [], None  # torch cannot reuse a pool after all its captures are released


class PieceGraphs(TorchGraphs):
    """Captures a segment in pieces: a graph ends where the segment leaves work out, and another one begins."""

    def __init__(self, device: TorchDevice, graph: Callable[[], Any], pool: Callable[[], Any], **begin: Any) -> None:
        super().__init__(device, graph, pool, **begin)
        self._calls: list[Callable[[], None]] = []
        #: The graph that records now, and its pool.
        self._open: tuple[Any, Any] | None = None

    def capture(self, segment: Callable[[], None]) -> Replay:
        self._calls = []
        super().capture(segment)
        return _PieceReplay(self._calls)

    def record(self, graph: Any, pool: Any, segment: Callable[[], None]) -> None:
        self._stream = self._stream or self.device.new_stream()
        with self.device.module.stream(self._stream):
            self._begin_piece(graph, pool)
            try:
                segment()
            finally:
                if self._open is not None:
                    self._end_piece()

    def leave_out(self, work: Callable[[], None]) -> None:
        """Do not capture ``work``, and do not call it now: each replay calls it between the pieces.

        Raises:
            RuntimeError: what was captured before it cannot be recorded.
        """
        pool = self._end_piece()
        self._calls.append(work)
        graph = self._graph()
        self._held.append(graph)
        self._begin_piece(graph, pool)

    def _begin_piece(self, graph: Any, pool: Any) -> None:
        graph.capture_begin(pool=pool, **self._begin)
        self._open = graph, pool

    def _end_piece(self) -> Any:
        """End the graph that records now; returns its pool."""
        assert self._open is not None, "a segment is captured"
        (graph, pool), self._open = self._open, None
        graph.capture_end()
        self._calls.append(graph.replay)
        return pool


class _PieceReplay(Replay):
    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self._calls = calls

    def __call__(self) -> None:
        for call in self._calls:
            call()
