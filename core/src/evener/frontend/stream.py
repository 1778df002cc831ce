"""The deltas of one request, for an asyncio task."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from evener.contracts.outputs import Delta


class RequestStream:
    """The deltas of one request, as an asynchronous iterator; ends after the last delta of the last sample.

    If the reader is slow, waiting deltas are merged. ``aclose`` before the end aborts the request; so does cancelling a
    task that waits in the iterator. ``async with`` closes automatically.

    Attributes:
        request_id: the request's id.
        prompt: the prompt's text; None if ids were given.
        prompt_token_ids: the prompt's ids.
        n: number of samples.

    Args:
        abort: called with the request id if the stream is closed before its end.
    """

    def __init__(
        self, request_id: str, prompt: str | None, ids: list[int], n: int, abort: Callable[[str], None]
    ) -> None:
        self.request_id, self.prompt, self.prompt_token_ids, self.n = request_id, prompt, ids, n
        self._abort = abort
        self._queue: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._unread, self._unfinished = n, n

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._queue:
            if self._unread == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        delta = self._queue.popleft()
        while self._queue and self._queue[0].index == delta.index and delta.finish_reason is None:
            delta.merge(self._queue.popleft())
        if delta.finish_reason is not None:
            self._unread -= 1
        return delta

    async def aclose(self) -> None:
        """Abort the request if it still runs. The iterator then ends."""
        self._queue.clear()
        self._unread = 0
        if self._unfinished:
            self._unfinished = 0
            self._abort(self.request_id)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def put(self, delta: Delta) -> None:
        """Add a delta; call it in the event loop's thread."""
        if self._unread == 0:
            return
        self._queue.append(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
