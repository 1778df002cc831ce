"""Adapters of linear weights (LoRA; Hu et al. 2021), and who reads them from folders. Torch-free.

An adapter adds ``scale * (x @ downᵀ) @ upᵀ`` to the product of a weight with ``x``. A package announces a reader in
``Descriptor.adapter_readers``: a function ``(folder: Path, limits: AdapterLimits) -> list[AdapterTensor] | None``. It
returns None if the folder is not of its format, and raises ``CheckpointError`` if it is and cannot be used. It runs in
the front end and reads the folder once; the folder may be anybody's, so it checks sizes before it reads numbers.
"""

from __future__ import annotations

import msgspec


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
