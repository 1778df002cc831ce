"""Responses that are generated after their request was answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from evener.errors import EvenerError
from evener_server.errors import ApiError, to_api_error
from evener_server.responses.event_log import EventLog
from evener_server.responses.job import ResponseJob
from evener_server.responses.store import ResponseStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Running:
    job: ResponseJob
    events: EventLog
    task: asyncio.Task[None]


class BackgroundResponses:
    """The background responses that run. Their number is limited like all requests'; the store has their states."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, _Running] = {}

    def start(self, job: ResponseJob) -> bytes:
        """Begin; the response's first state."""
        queued = job.state("queued")
        self._store.replace(job.id, queued)
        events = EventLog()
        task = asyncio.ensure_future(self._run(job, events))
        self._running[job.id] = _Running(job, events, task)
        task.add_done_callback(lambda _: self._running.pop(job.id, None))
        return queued

    def events(self, name: str, after: int = -1) -> AsyncIterator[bytes]:
        """The events of a response that was streamed, behind the one with this sequence number, until it ends.

        Raises:
            ApiError: it is not known, or was not streamed.
        """
        if name in self._running and self._running[name].job.stream:
            return self._running[name].events.after(after)
        if not (kept := self._store.events(name)):
            message = "only a response that was sent with background=true and stream=true can be streamed again"
            raise ApiError(400, message, "stream", "unsupported_parameter")
        return EventLog(kept).after(after)

    async def cancel(self, name: str) -> bytes:
        """End a response; its state then.

        Raises:
            ApiError: it is not known, or was not sent to the background.
        """
        found = self._store.response(name)
        if name not in self._running:
            if b'"background":true' in found:
                return found  # it has ended
            raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")
        running = self._running[name]
        running.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running.task
        cancelled = running.job.state("cancelled")
        self._store.replace(name, cancelled)
        return cancelled

    async def _run(self, job: ResponseJob, events: EventLog) -> None:
        try:
            async with await job.start() as generation:
                self._store.replace(job.id, job.state("in_progress"))
                if not job.stream:
                    await job.full_response(generation)
                    return
                async with contextlib.aclosing(job.events(generation)) as pieces:
                    async for piece in pieces:
                        events.add(piece)
        except (ApiError, EvenerError) as error:
            self._fail(job, events, to_api_error(error))
        except Exception as error:
            logger.exception("response %s failed in the background", job.id)
            self._fail(job, events, to_api_error(error))
        finally:
            events.end()
            self._store.add_events(job.id, events.whole())

    def _fail(self, job: ResponseJob, events: EventLog, error: ApiError) -> None:
        self._store.replace(job.id, job.state("failed", error))
        if job.stream:
            events.add(job.error_event(error))
