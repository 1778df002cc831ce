"""The graph contract: capture a step once, then replay it.

A step has two segments, which use fixed addresses: forward (token ids to logits) and sample (logits to ids). Whatever
changes from step to step is in buffers that exist before the capture; the runner writes into them and never reallocates
them. Eager execution is always correct: a bucket that cannot be captured runs eagerly, and the manifest says why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class Replay(ABC):
    """One captured segment. It keeps the tensors alive that the segment allocated during the capture, at the same
    addresses: the engine and later segments read the results of each replay there."""

    @abstractmethod
    def __call__(self) -> None:
        """Run the segment again on the same addresses, after the work submitted so far."""

    def update(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        """(optional) Refresh lengths from the host that the capture stored in the graph as constants.

        Called before each run if ``DeviceCapabilities.graph_update`` is set, with the lengths of the step that follows
        (``StateStep.host_query_lens`` and ``host_kv_lens``, with padding rows). A state provider whose kernels take
        lengths from the host registers them with its own ``GraphCapture`` in ``prepare``, which runs inside the
        capture. Default: nothing.
        """
        del query_lens, kv_lens


class GraphCapture(ABC):
    """Captures work on one device."""

    @abstractmethod
    def capture(self, segment: Callable[[], None]) -> Replay:
        """Capture ``segment``. It was run once before, and uses only tensors that live as long as the replay, or that
        it allocates itself.

        Call ``segment`` exactly once. The device may compute during the capture or not: the replay is always run before
        results are read. If it computes, its inputs may be garbage, because the segment before may not have computed.

        The engine captures a size when a step first has it, and keeps the capture. Captures are not in the memory plan:
        5 percent of the free memory after a warm-up stay out of the state pool for them; if that is too little, users
        lower ``infer.kv_memory`` or ``infer.max_reqs``. A decode step has two segments. Sizes are 1, 2, 4, 8, 16, 24,
        32, 48 and so on up to ``infer.max_reqs``, each once for greedy requests, and once for sampled, penalized and
        biased requests when they occur, and again for long state (``StateProvider.capture_limits``); and up to 32 kinds
        of steps of one short prompt (``StateProvider.graph``). Let captures share one memory pool, because they never
        run at the same time; but what a segment leaves for the next segment must survive the other captures of the
        pool.

        Raises:
            EngineError: the segment cannot be captured; the caller runs it eagerly and records the reason. Any other
                exception ends the engine.
        """

    def release(self) -> None:
        """(optional) Free all captures. More may be made later. Default: nothing."""
        return
