"""How ranks communicate: through a package's communicator, or through gloo on the CPU; and graphs that either all ranks
of a group capture, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from evener.contracts.communicator import Communicator
from evener.contracts.graph import GraphCapture, Replay
from evener.errors import BackendError, EngineError

if TYPE_CHECKING:
    from evener.contracts.communicator import CommunicatorFactory
    from evener.contracts.device import Device
    from evener.plugins.catalog import Provided


def communicator_factory(offer: Provided[CommunicatorFactory] | None, device: Device) -> CommunicatorFactory:
    """The factory that a package provides for ``device``, or one of gloo communicators for a device in host memory.

    Raises:
        BackendError: (when the factory is called) no package provides one, and the device is not in host memory.
    """
    if offer is not None:
        return offer.value

    def default(name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
        if not device.capabilities.host_memory:
            raise BackendError(f"no package provides a communicator for {device.name}; install one, or run one rank")
        return open_host_group(name, ranks, rank, world_size, init_method)

    return default


def open_host_group(name: str, ranks: Sequence[int], rank: int, world_size: int, init_method: str) -> Communicator:
    """A ``CommunicatorFactory`` of tensors in host memory, which all backends' ranks have."""
    from evener.backend.torch_communicator import open_torch_communicator

    return open_torch_communicator("gloo", name, ranks, rank, world_size, init_method)


class JointCapture(GraphCapture):
    """Captures a segment on all ranks of a group, and fails on all if it fails on one.

    A replayed step has padding rows and an eager one has none. If one rank ran eagerly what others replay, the sizes of
    the tensors that they exchange would not match.

    Args:
        inner: how this rank's device captures.
        group: the ranks that share layers. Each captures the same segments in the same order.
        where: a device whose tensors the group can send.
    """

    def __init__(self, inner: GraphCapture, group: Communicator, where: torch.device) -> None:
        self._inner, self._group, self._where = inner, group, where

    def capture(self, segment: Callable[[], None]) -> Replay:
        failure: EngineError | None = None
        try:
            replay = self._inner.capture(segment)
        except EngineError as error:
            failure = error
        each = self._group.all_gather(torch.tensor([failure is None], device=self._where), dim=0).tolist()
        if all(each):
            return replay
        raise failure or EngineError(f"rank {each.index(False)} of {self._group.size} cannot capture it")

    def release(self) -> None:
        self._inner.release()
