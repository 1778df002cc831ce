"""The front end's side of a search whose requests start from the state of those before them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from evener.async_llm import AsyncLLM
from evener.engine.wire.messages import Command
from evener.errors import EngineDeadError, EngineError
from evener_forks.mark import ForkMark


class ForkSearch:
    """One search on ``llm``: ``open`` it, give each request ``transfer`` of it, ``close`` it.

    Args:
        search: its id.
    """

    def __init__(self, llm: AsyncLLM, search: str) -> None:
        self._llm, self._id, self._open = llm, search, False

    async def open(self) -> None:
        """Let the engine keep states. Does nothing if it takes no requests now: then the first request is refused.

        Raises:
            EngineDeadError: the engine has stopped; EngineError: it cannot keep states.
        """
        if not self._open and self._llm.ready:
            self._open = True
            await self._command("open")

    def transfer(self, parent: str, parents: Sequence[str]) -> str:
        """What a request says in ``SamplingParams.transfer``; the arguments are those of ``ForkMark``."""
        return ForkMark(self._id, parent, list(parents)).to_text() if self._open else ""

    async def close(self) -> None:
        """Release the states that are left. Calling it again does nothing."""
        if self._open and self._llm.alive:
            self._open = False
            # A task: the states are released also if the caller is cancelled.
            await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        with contextlib.suppress(EngineDeadError):  # it keeps nothing then
            await self._command("end")

    async def _command(self, action: str) -> None:
        async with self._llm.commanding:
            done = await self._llm.command(Command("forks", [action, self._id]))
        if done.error is not None:
            raise EngineError(done.error)
