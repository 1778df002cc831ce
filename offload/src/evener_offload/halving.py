"""Which steps are computed in two halves: all that can be, none, or those of sizes for which halves were faster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from evener.distributed.agreement import ALONE, Agreement

#: Whole steps of a size that are timed, and halved ones, in turns. The fastest count: the first ones may compile.
TRIES = 4
#: After so many more steps the size is timed again: the routing and the length of sequences may have changed.
AGAIN = 4096
#: Halves must take at most this share of the time of whole steps.
_FASTER = 0.97


@dataclass
class _Size:
    """What is known of one size.

    Attributes:
        seconds: of whole steps, and of halved steps.
        halved: the decision; None: not decided yet.
        steps: of this size since the decision.
    """

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    halved: bool | None = None
    steps: int = 0


class Halving:
    """Decides for steps that can be halved.

    Args:
        mode: "on", "off", or "auto" (measured times decide).
        agreement: of the ranks that compute the same steps.
    """

    def __init__(self, mode: str, agreement: Agreement = ALONE) -> None:
        self._mode, self._agreement = mode, agreement
        self._sizes: dict[int, _Size] = defaultdict(_Size)

    def __call__(self, bucket: int) -> bool:
        """Whether the next step of the size ``bucket`` is halved."""
        if self._mode != "auto":
            return self._mode == "on"
        size = self._sizes[bucket]
        whole, halved = map(len, size.seconds)
        return whole > halved if size.halved is None else size.halved

    def record(self, bucket: int, halved: bool, seconds: float) -> None:
        """Note how long the step took."""
        if self._mode != "auto":
            return
        size = self._sizes[bucket]
        if size.halved is None:
            size.seconds[halved].append(seconds)
            if min(map(len, size.seconds)) >= TRIES:
                whole, halves = map(min, size.seconds)
                size.halved = bool(self._agreement.least([halves < _FASTER * whole])[0])
            return
        size.steps += 1
        if size.steps >= AGAIN:
            del self._sizes[bucket]

    def __str__(self) -> str:
        return {"on": "always", "off": "never", "auto": "where that is measured to be faster"}[self._mode]
