"""The connector ``host``: see ``evener.contracts.connector``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.config.schema import Config
from evener.contracts.connector import BlockMover
from evener.engine.controller.state import StateManager
from evener.engine.facts.worker_facts import WorkerFacts
from evener.plugins.discover import core_version
from evener_kv.files.rank_files import RankFiles
from evener_kv.files.settings import FileSettings
from evener_kv.files.stored_blocks import StoredBlocks
from evener_kv.host_blocks import HostBlocks
from evener_kv.transfer.fingerprint import fingerprint

if TYPE_CHECKING:
    import torch

    from evener.engine.worker.assembly import Assembly


class HostConnector:
    """Makes the halves."""

    @staticmethod
    def controller(config: Config, facts: WorkerFacts, state: StateManager) -> HostBlocks:
        """The half that decides.

        Raises:
            ConfigError: the folder of ``offload.kv_files`` cannot be used.
        """
        settings = FileSettings.of(config)
        if settings is None:
            return HostBlocks(state, facts.kept_slabs)
        ranks = config.infer.tp_size * config.infer.pp_size
        return HostBlocks(state, facts.kept_slabs, StoredBlocks(settings, fingerprint(config, facts), ranks))

    @staticmethod
    def worker(assembly: Assembly, storage: torch.Tensor) -> BlockMover:
        """A rank's half; ``storage`` is what ``Geometry.bind`` returned.

        Raises:
            ConfigError: the host has less memory than was asked for, or not even one slab was; or the folder of
                ``offload.kv_files`` cannot be used.
        """
        from evener_kv.host_memory import HostMemory  # imports torch, which a controller may not need

        settings, made = FileSettings.of(assembly.config.config), HostMemory.of(assembly, storage)
        if settings is not None:
            rank, device = assembly.ranks.world.rank, assembly.device
            made.files = RankFiles(settings, rank, made.sizes, _layout(assembly), made, device.select)
            assembly.resolver.manifest.notes.append(f"blocks of the KV cache are kept in files: {settings.folder}")
        return made


def _layout(assembly: Assembly) -> str:
    """What the bytes of a block in the pool depend on beside the model: who lays them out, and where they are cut."""
    groups = [(group.provider.name, group.cut, len(group.slots)) for group in assembly.geometry.groups]
    # Among them the one whose model this is: a later version of it may compute other state.
    packages = sorted({(each.distribution, each.version) for each in assembly.loaded.selection.all_packages})
    return repr((core_version(), groups, assembly.geometry.slab_bytes, packages, assembly.device.name))
