"""Placements: routed experts that another backend holds and computes, so that they are not on the device.

A package that is pinned to its core's version announces a placement in ``Descriptor.placements``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.quant import Packing

if TYPE_CHECKING:
    import torch


class Placement(ABC):
    """Where the routed experts of some layers are instead of on the device: another backend holds their weights and
    computes them. ``str`` of it names that backend.

    Attributes:
        torch_device: of the weights.
        packings: that backend's, by layout.
        layers: numbers of the layers.
        free: bytes that this rank may use there.
        eager_forward: (optional) computes steps that are not captured: takes the runner, the plan and the step of
            ``evener.engine.worker`` and returns what ``Architecture.forward`` does. It may compute the rows in parts,
            each of which must write a layer's state before later ones read it. None: ``Architecture.forward``.
        eager: (optional) why steps with it cannot be captured, as the end of a sentence that begins with "experts of 2
            layers are in host memory"; None: they can.
        replayed: (optional) told before each replay of a captured step how many of its rows, the first ones, are not
            padding.
    """

    torch_device: torch.device
    packings: Mapping[str, Packing]
    layers: tuple[int, ...]
    free: int
    eager_forward: Callable[..., torch.Tensor] | None = None
    eager: str | None = ""
    replayed: Callable[[int], None] | None = None

    def counters(self) -> Mapping[str, int]:
        """(optional) What it has counted since the start, for a server's metrics; read when a step is done, so it
        raises what failed on the host in a captured step. Default: nothing."""
        return {}

    def close(self) -> None:  # noqa: B027  # optional
        """(optional) End its threads; no step follows. Calling it again does nothing. Default: nothing."""

    @abstractmethod
    def resolve(self, op: str, path: str, static: Static, bucket: Bucket) -> OpFunction:
        """The callable of ``routed_experts`` at one bucket. It takes the op's inputs on the device, starts, and returns
        a function without arguments that waits for the result, which is on the device. Work that is submitted in
        between runs at the same time."""
