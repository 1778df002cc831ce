"""When requests have to be over."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class Deadlines:
    """Requests that may only take so long, the next to run out first. Asking costs nothing while none has.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def set(self, request_id: str, seconds: float | None) -> None:
        """From now on; None: it may take as long as it likes, whatever an earlier request of this id was given."""
        self._due.pop(request_id, None)
        if seconds is not None:
            self._due[request_id] = due = self._clock() + seconds
            heapq.heappush(self._heap, (due, request_id))

    def passed(self) -> Iterator[str]:
        """Ids whose time is over, once each. Some may have ended before."""
        while self._heap and self._heap[0][0] <= self._clock():
            due, request_id = heapq.heappop(self._heap)
            if self._due.get(request_id) == due:
                del self._due[request_id]
                yield request_id
