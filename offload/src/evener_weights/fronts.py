"""What ``LLM`` and ``AsyncLLM`` do when weights change: they wait, refuse requests, and name the version."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from evener.engine.wire.messages import Command, CommandDone
from evener.errors import CheckpointError

if TYPE_CHECKING:
    from evener.async_llm import AsyncLLM
    from evener.llm import LLM

RELEASE, LOAD = Command("weights", ["release", ""]), Command("weights", ["load", ""])


def load(folder: str | Path) -> Command:
    """The order to load the weights of a folder, which may be relative to the current one."""
    return Command("weights", ["load", str(Path(folder).absolute())])


class Front:
    """For ``LLM``, which documents the functions."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def sleep(self) -> None:
        """``LLM.sleep``."""
        _check(self._llm.command(RELEASE))

    def wake_up(self) -> None:
        """``LLM.wake_up``."""
        _check(self._llm.command(LOAD))

    def update(self, folder: str | Path, version: str | None) -> None:
        """``LLM.update_weights``."""
        _check(self._llm.command(load(folder)))
        _count(self._llm, version)


class AsyncFront:
    """For ``AsyncLLM``, which documents the functions."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def sleep(self, timeout: float | None) -> None:
        """``AsyncLLM.sleep``."""
        await self._change(RELEASE, timeout)

    async def wake_up(self) -> None:
        """``AsyncLLM.wake_up``."""
        await self._change(LOAD, None)

    async def update(self, folder: str | Path, version: str | None, timeout: float | None) -> None:
        """``AsyncLLM.update_weights``."""
        await self._change(load(folder), timeout, version)

    async def _change(self, order: Command, timeout: float | None, version: str | None = None) -> None:
        # A task: a caller that is cancelled must not leave the engine half changed.
        await asyncio.shield(asyncio.ensure_future(self._change_alone(order, timeout, version)))

    async def _change_alone(self, order: Command, timeout: float | None, version: str | None) -> None:
        llm, (action, folder) = self._llm, order.arguments
        async with llm.commanding:
            before, llm.paused = llm.paused, "the weights are being changed; try again in a moment"
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(llm.idle.wait(), timeout)
                _check(await llm.command(order))
                llm.asleep = action == "release"
                before = "the engine is asleep; wake it up first" if llm.asleep else None
                if folder:
                    _count(llm, version)
            finally:
                llm.paused = before


def _check(done: CommandDone) -> None:
    if done.error is not None:
        raise CheckpointError(done.error)


def _count(llm: LLM | AsyncLLM, version: str | None) -> None:
    """Name the weights that were loaded last."""
    llm.updates += 1
    llm.weights_version = version or str(llm.updates)
