"""The events of one streamed response, for as many readers as come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

#: Between events. JSON texts have no line breaks of their own.
_END = b"\n\n"


class EventLog:
    """Grows while the response is generated. An event's place is its sequence number.

    Args:
        events: bytes of a response that has ended; None: it is still generated.
    """

    def __init__(self, events: bytes | None = None) -> None:
        self._events: list[bytes] = []
        self._more, self._ended = asyncio.Event(), False
        if events is not None:
            self.add(events)
            self.end()

    def add(self, piece: bytes) -> None:
        """Append one or more whole events."""
        self._events += (each + _END for each in piece.split(_END)[:-1])
        self._wake()

    def end(self) -> None:
        """No more events will come."""
        self._ended = True
        self._wake()

    def whole(self) -> bytes:
        """All events so far."""
        return b"".join(self._events)

    async def after(self, number: int) -> AsyncIterator[bytes]:
        """The events behind the one with this sequence number, those to come included; -1: all."""
        place = number + 1
        while not self._ended or place < len(self._events):
            if place < len(self._events):
                found, place = b"".join(self._events[place:]), len(self._events)
                yield found
            else:
                await self._more.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
