"""How ranks talk where no package says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evener.errors import BackendError

if TYPE_CHECKING:
    from evener.contracts.communicator import Communicator, CommunicatorFactory
    from evener.contracts.device import Device
    from evener.plugins.hub import Provided


def communicators(offer: Provided[CommunicatorFactory] | None, device: Device) -> CommunicatorFactory:
    """What a package offers for ranks on ``device``; host memory needs no package of its own for it."""
    if offer is not None:
        return offer.value

    def default(name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
        from evener.distributed.torch_communicator import open_torch_communicator

        if not device.capabilities.host_memory:
            raise BackendError(f"no package says how ranks on {device.name} talk; run one rank, or install one")
        return open_torch_communicator("gloo", name, ranks, rank, world_size, init_method)

    return default
