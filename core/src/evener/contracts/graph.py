"""The graph contract: capture a step once, replay it.

A step is two segments over fixed addresses: forward (token ids to logits) and sample (logits to ids). What varies from
step to step lives in buffers made before capture; the runner writes into them and never reallocates. Eager is
always correct: a bucket that cannot be captured runs eagerly and the manifest says why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Replay(ABC):
    """One captured segment."""

    @abstractmethod
    def __call__(self) -> None:
        """Run it again on the same addresses, after the work submitted so far."""

    def update(self) -> None:
        """(optional) Refresh parameters that the vendor's graphs bake in. Called before each run where
        ``DeviceCapabilities.graph_update`` is set. Default: nothing."""
        return


class GraphCapture(ABC):
    """How one device captures work."""

    @abstractmethod
    def capture(self, segment: Callable[[], None]) -> Replay:
        """Capture ``segment``, which was run once before and only touches tensors that live as long as the replay.

        Raises:
            EngineError: the segment cannot be captured; the caller goes on eagerly and records the reason.
        """

    def release(self) -> None:
        """(optional) Free every capture. Default: nothing."""
        return
