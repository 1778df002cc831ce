"""Responses that are generated after their request was answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from evener.errors import EvenerError
from evener_server.errors import ApiError, to_api_error
from evener_server.responses.job import ResponseJob
from evener_server.responses.store import ResponseStore

logger = logging.getLogger(__name__)


class BackgroundResponses:
    """The background responses that run. Their number is limited like all requests'; the store has their states."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, tuple[ResponseJob, asyncio.Task[None]]] = {}

    def start(self, job: ResponseJob) -> bytes:
        """Begin; the response's first state."""
        queued = job.state("queued")
        self._store.replace(job.id, queued)
        task = asyncio.ensure_future(self._run(job))
        self._running[job.id] = (job, task)
        task.add_done_callback(lambda _: self._running.pop(job.id, None))
        return queued

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
        job, task = self._running[name]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        cancelled = job.state("cancelled")
        self._store.replace(name, cancelled)
        return cancelled

    async def _run(self, job: ResponseJob) -> None:
        try:
            async with await job.start() as generation:
                self._store.replace(job.id, job.state("in_progress"))
                await job.full_response(generation)
        except (ApiError, EvenerError) as error:
            self._store.replace(job.id, job.state("failed", to_api_error(error)))
        except Exception as error:
            logger.exception("response %s failed in the background", job.id)
            self._store.replace(job.id, job.state("failed", to_api_error(error)))
