"""The connector ``host``: see ``evener.contracts.connector``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.config.schema import Config
from evener.contracts.connector import BlockMover, Connector
from evener.engine.controller.state import StateManager
from evener.engine.wire.worker_facts import WorkerFacts
from evener_kv.host_blocks import HostBlocks

if TYPE_CHECKING:
    import torch

    from evener.engine.worker.assembly import Assembly


class HostConnector:
    """Makes the halves."""

    @staticmethod
    def controller(config: Config, facts: WorkerFacts, state: StateManager) -> Connector:
        """The half that decides."""
        del config
        return HostBlocks(state, facts.kept_slabs)

    @staticmethod
    def worker(assembly: Assembly, storage: torch.Tensor) -> BlockMover:
        """A rank's half; ``storage`` is what ``Geometry.bind`` returned.

        Raises:
            ConfigError: the host has less memory than was asked for, or not even one slab was.
        """
        from evener_kv.host_memory import HostMemory  # imports torch, which a controller may not need

        return HostMemory.of(assembly, storage)
