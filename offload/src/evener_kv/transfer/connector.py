"""The connector ``transfer``: see ``evener.contracts.connector``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.config.schema import Config
from evener.contracts.connector import BlockMover
from evener.engine.controller.state import StateManager
from evener.engine.facts.worker_facts import WorkerFacts
from evener_kv.transfer.fingerprint import fingerprint
from evener_kv.transfer.remote_blocks import RemoteBlocks
from evener_kv.transfer.settings import TransferSettings

if TYPE_CHECKING:
    import torch

    from evener.engine.worker.assembly import Assembly


class TransferConnector:
    """Makes the halves."""

    @staticmethod
    def controller(config: Config, facts: WorkerFacts, state: StateManager) -> RemoteBlocks:
        """The half that decides.

        Raises:
            ConfigError: a setting cannot be used, or the address cannot be listened on.
        """
        settings = TransferSettings.of(config)
        ranks = config.infer.tp_size * config.infer.pp_size
        return RemoteBlocks(state, settings, fingerprint(config, facts), ranks)

    @staticmethod
    def worker(assembly: Assembly, storage: torch.Tensor) -> BlockMover:
        """A rank's half; ``storage`` is what ``Geometry.bind`` returned.

        Raises:
            ConfigError: as ``controller``.
        """
        from evener_kv.transfer.landing import Landing  # imports torch, which a controller may not need

        return Landing.of(assembly, storage, TransferSettings.of(assembly.config.config))
