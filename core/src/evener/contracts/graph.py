"""The graph contract: capture a step once, replay it.

A step is two segments over fixed addresses: forward (token ids to logits) and sample (logits to ids). What varies from
step to step lives in buffers made before capture; the runner writes into them and never reallocates. Eager is
always correct: a bucket that cannot be captured runs eagerly and the manifest says why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class Replay(ABC):
    """One captured segment. It keeps alive whatever the segment made while it was captured, at the same addresses: the
    engine and the segments that follow read there what each replay leaves."""

    @abstractmethod
    def __call__(self) -> None:
        """Run it again on the same addresses, after the work submitted so far."""

    def update(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        """(optional) Refresh what the vendor's graphs bake in: host numbers that attention was given at capture.

        Called before each run where ``DeviceCapabilities.graph_update`` is set, with the lengths of the step that
        follows (``StateStep.host_query_lens`` and ``host_kv_lens``), those of padding rows included. A state provider
        that gives its kernels lengths of the host registers them with its own ``GraphCapture`` in ``prepare``, which
        runs inside the capture. Default: nothing.
        """
        del query_lens, kv_lens


class GraphCapture(ABC):
    """How one device captures work."""

    @abstractmethod
    def capture(self, segment: Callable[[], None]) -> Replay:
        """Capture ``segment``, which was run once before and only touches tensors that live as long as the replay, or
        that it makes itself.

        Call it exactly once. Whether the device computes meanwhile is yours to choose: before anything is read, the
        replay is run. What it reads may be garbage then, as a segment before it may not have computed either.

        Captures are made when a step of their size comes first, and are kept. The memory plan has no room for them: of
        what a warm-up step leaves free, 5 percent stay out of the state pool, and if that is too little users lower
        ``infer.kv_memory`` or ``infer.max_reqs``. A step of decoding has two segments; sizes are 1, 2, 4, 8, 16, 24,
        32, 48 and so on up to ``infer.max_reqs``, each once for greedy and once for sampled, penalized and biased
        requests as they occur. Let captures share one pool, as they never run at the same time; what a segment leaves
        for the next one must then outlast the other captures of the pool.

        Raises:
            EngineError: the segment cannot be captured; the caller goes on eagerly and records the reason. Anything
                else that is raised ends the engine.
        """

    def release(self) -> None:
        """(optional) Free every capture; others may follow. Default: nothing."""
        return
