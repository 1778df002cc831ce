"""Adapters of linear weights (LoRA; Hu et al. 2021): who reads them from folders, and who computes with them.
Torch-free.

An adapter adds ``scale * (x @ downᵀ) @ upᵀ`` to the product of a weight with ``x``. A package announces a reader in
``Descriptor.adapter_readers``: a function ``(folder: Path, limits: AdapterLimits) -> list[AdapterTensor] | None``. It
returns None if the folder is not of its format, and raises ``CheckpointError`` if it is and cannot be used. It runs in
the front end and reads the folder once; the folder may be anybody's, so it checks sizes before it reads numbers.

Another package, of the same version as core, announces in ``Descriptor.adapters`` what computes with them: a class with
three static functions. They are called if ``infer.max_loras`` or ``infer.lora_modules`` asks for places::

    front_end(limits, reserved: Sequence[str], send: Callable[[ToController], None], modules: Sequence[str]) -> Adapters
    controller(infer: InferConfig) -> AdapterSlots
    worker(build: Builder, infer: InferConfig, stages: Sequence[Builder]) -> AdapterStacks

``reserved`` are names that no adapter may have, ``modules`` those of ``infer.lora_modules``, ``build`` this rank's
declarations and ``stages`` those of all pipeline stages. ``Adapters``, ``AdapterSlots`` and ``AdapterStacks`` as they
stand here are the parts of an engine without adapters. The messages between them are in ``evener.engine.wire``. The
ranks keep every loaded adapter in host memory; one gets a place on the device when a request with it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from evener.contracts.ops import OpFunction, Static, Use
from evener.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    import torch


class AdapterTensor(msgspec.Struct, frozen=True, array_like=True):
    """The adapter of one stored weight.

    Attributes:
        name: of the weight in the checkpoint, a key of ``AdapterLimits.targets``.
        rank: columns of ``up`` and rows of ``down``.
        scale: factor on the product.
        dtype: "float32", "float16" or "bfloat16".
        down: [rank, columns] in C order, little-endian; every number is finite.
        up: [rows, rank], the same.
    """

    name: str
    rank: int
    scale: float
    dtype: str
    down: bytes
    up: bytes


class HeldAdapter(msgspec.Struct, frozen=True):
    """A loaded adapter, which stays until it is released, whatever becomes of its name. ``id``: the engine's."""

    id: str


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes.

    Attributes:
        targets: the weights that may have adapters, as the checkpoint names them, with their rows and columns.
        rank: the largest rank.
        loaded: how many adapters may be loaded at the same time.
    """

    targets: dict[str, tuple[int, int]]
    rank: int
    loaded: int


class Adapters:
    """The front end's part: the adapters that requests may name. Thread-safe."""

    @property
    def folders(self) -> Mapping[str, str]:
        """The folder of each loaded adapter, by name."""
        return {}

    def load(self, name: str, folder: str | Path, replace: bool = False) -> None:
        """Let requests name the adapter in a folder. It is read once, which may take seconds.

        Args:
            replace: in place of one with the same name, which requests that were submitted keep.

        Raises:
            RequestError: the engine takes no adapters, the name cannot be used, or too many are loaded.
            CheckpointError: the folder cannot be used.
        """
        raise RequestError("this engine takes no adapters; start it with infer.max_loras=1 or more", "lora_name")

    def unload(self, name: str) -> None:
        """Let no more requests name an adapter; those that were submitted keep it.

        Raises:
            RequestError: there is no such adapter.
        """
        self.find(name)

    def hold(self, adapter: str | HeldAdapter | None) -> HeldAdapter | None:
        """Keep an adapter in the engine until ``release`` ends each hold, even if it is unloaded or replaced meanwhile.

        Raises:
            RequestError: there is no such adapter.
        """
        self.find(adapter)
        return None

    def release(self, held: HeldAdapter | None) -> None:
        """End one ``hold``."""

    def find(self, name: str | HeldAdapter | None) -> str:
        """The id of an adapter; "" for None.

        Raises:
            RequestError: there is no such adapter.
        """
        if name is not None:
            raise RequestError(f"no adapter {str(name)[:256]!r} is loaded{did_you_mean('', ())}", "lora")
        return ""


class AdaptedRequest(Protocol):
    """What is read of a scheduler's request.

    Attributes:
        message: its ``NewRequest``.
    """

    message: Any


R = TypeVar("R", bound=AdaptedRequest)


class AdapterSlots:
    """The controller's part: which adapters are loaded, and which of them have a place (slot) on the device. The
    scheduler calls it between two steps, so it must be quick."""

    def handle(self, message: Any) -> Iterable[Any]:
        """A ``LoadAdapter`` or ``UnloadAdapter`` came. Returns those that the ranks get."""
        return ()

    def forgotten(self) -> Iterable[Any]:
        """An ``UnloadAdapter`` for each adapter that the ranks need no longer; each once."""
        return ()

    def open(self, adapter: str) -> bool:
        """A request with this adapter ("": none) arrives; False if it is not loaded."""
        return not adapter

    def close(self, adapter: str) -> None:
        """A request with this adapter has ended, and no plan computes it any more."""

    def startable(self, requests: Iterable[R]) -> R | None:
        """The first that may start; None: none may."""
        return next(iter(requests), None)

    def start(self, adapter: str) -> int:
        """A request that may start does so. Returns the adapter's slot; -1 without an adapter."""
        return -1

    def stop(self, adapter: str) -> None:
        """A request that was started with this adapter has left its slot in the device tables."""

    def writes(self) -> list[Any]:
        """An ``AdapterWrite`` for each adapter that got its slot since the last plan."""
        return []


class AdapterStacks:
    """A rank's part: its places for adapters beside the model's linear weights.

    Attributes:
        limits: what the front end is told; None: no adapters.
    """

    limits: AdapterLimits | None = None

    def keep(self, order: Any) -> None:
        """Keep this rank's part of the tensors of a ``LoadAdapter`` in host memory, or forget an adapter as
        ``UnloadAdapter`` says."""

    def write(self, writes: Sequence[Any]) -> None:
        """Fill the places that a plan's ``AdapterWrite`` name with what was kept, before its rows run."""

    def select(self, index: torch.Tensor | None) -> None:
        """The rows of the step that is being computed have these slots, int32 [T], -1 for a row without an adapter;
        None: no row has one. It may be captured."""


class AdaptedProduct(Protocol):
    """Places for adapters beside one linear weight."""

    def linear(self, static: Static, use: Use) -> OpFunction:
        """What serves ``linear`` with this weight; made of ``linear`` without adapters, and of ``add_adapters``."""
