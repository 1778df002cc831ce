"""Weights that are released, loaded again or replaced while an engine runs. An installed package does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from evener.engine.wire.installed import find_commands
from evener.engine.wire.messages import Command, CommandDone


class WeightCommands(ABC):
    """Commands about weights, for an engine with one caller."""

    @abstractmethod
    def command(self, order: Command) -> CommandDone:
        """Have an installed package do something between two calls: for that package, see ``engine.wire.installed``.

        Raises:
            EngineDeadError: the engine has stopped.
        """

    def sleep(self) -> None:
        """Release the memory of weights and KV cache; requests fail until ``wake_up`` or ``update_weights``.

        Raises:
            CheckpointError: this engine cannot; EngineDeadError: it has stopped.
        """
        find_commands("weights").front(self).sleep()

    def wake_up(self) -> None:
        """Load the weights again. They must still be where they were.

        Raises:
            CheckpointError: they cannot be loaded, and the engine stays asleep; EngineDeadError: it has stopped.
        """
        find_commands("weights").front(self).wake_up()

    def update_weights(self, folder: str | Path, version: str | None = None) -> None:
        """Replace the weights by those of another folder of the same model, also of an engine that is asleep. Cached
        prefixes are forgotten.

        Args:
            version: becomes ``weights_version``; None: the number of updates, and one.

        Raises:
            CheckpointError: the folder does not fit, and nothing has changed; EngineDeadError: the engine has stopped.
        """
        find_commands("weights").front(self).update(folder, version)


class AsyncWeightCommands(ABC):
    """Commands about weights, for an engine behind asyncio. Running requests have ``timeout`` seconds to end (None: as
    long as they take); then they end with an error. New ones are refused meanwhile."""

    @abstractmethod
    async def command(self, order: Command) -> CommandDone:
        """As ``LLM.command``, between steps. The caller holds ``commanding``."""

    async def sleep(self, timeout: float | None = None) -> None:
        """As ``LLM.sleep``.

        Raises:
            CheckpointError, EngineDeadError: as ``LLM.sleep``.
        """
        await find_commands("weights").async_front(self).sleep(timeout)

    async def wake_up(self) -> None:
        """As ``LLM.wake_up``."""
        await find_commands("weights").async_front(self).wake_up()

    async def update_weights(
        self, folder: str | Path, version: str | None = None, timeout: float | None = None
    ) -> None:
        """As ``LLM.update_weights``; with running requests as ``sleep``."""
        await find_commands("weights").async_front(self).update(folder, version, timeout)
