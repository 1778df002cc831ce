"""The time limits of requests (``NewRequest.max_time``)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class Deadlines:
    """A heap of deadlines, the earliest first. While none has passed, ``expired`` looks at one entry only.

    Args:
        clock: the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, str]] = []
        self._times: dict[str, float] = {}

    def set(self, request_id: str, seconds: float | None) -> None:
        """Let the request end ``seconds`` from now; None: no limit. Replaces the deadline of an earlier request with
        this id."""
        self._times.pop(request_id, None)
        if seconds is not None:
            self._times[request_id] = time = self._clock() + seconds
            heapq.heappush(self._heap, (time, request_id))

    def expired(self) -> Iterator[str]:
        """The ids whose deadline has passed, each once. They include requests that have ended in time."""
        while self._heap and self._heap[0][0] <= self._clock():
            time, request_id = heapq.heappop(self._heap)
            if self._times.get(request_id) == time:  # it was not replaced
                del self._times[request_id]
                yield request_id
