"""Filling the weights and tables of an assembled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from evener.contracts.declared import Declared
from evener.contracts.device import Device
from evener.contracts.quant import Packing
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.memory import divide_weights
from evener.errors import CheckpointError
from evener.loading.loader import WeightBytes, load_weights
from evener.plugins.discover import installed_catalog

#: Rows of position tables that are made at a time.
ROWS = 2048


class PositionTables:
    """Tables with a row for each position, such as rotary angles, in host memory. Most requests read few of their rows,
    so rows are made as requests get longer. Addresses do not change: a table reserves all its memory at the start, and
    the system provides only the pages that are written. Other devices get whole tables with the weights, because their
    steps must not wait for the host. So does a model with a draft model, which computes positions that no plan names.
    """

    def __init__(self, a: Assembly) -> None:
        self._rows = a.build.rows if a.device.capabilities.host_memory and a.draft is None else {}
        self._length = a.build.max_positions
        self._made = 0 if self._rows else self._length
        for table in self._rows:
            table.value = a.device.zeros(table.nbytes).view(torch.float32).view(self._length, -1)

    def ensure(self, plan: Plan) -> None:
        """Make the rows that a step reads."""
        while self._made < min(self._length, max(map(sum, zip(plan.starts, plan.counts, strict=True)), default=0)):
            first, self._made = self._made, min(self._made + ROWS, self._length)
            for table, rows in self._rows.items():
                assert table.value is not None, "it has its memory from the start"
                table.value[first : self._made] = rows(first, self._made)


def load_stage(a: Assembly) -> WeightBytes:
    """Fill the weights of this rank's part of the model, from the checkpoint or with random numbers (``load=dummy``).
    Tables that have a value keep it.

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape; or no installed package makes weights.
    """
    here, placed = divide_weights(a)
    place = a.placement  # its weights come first: it may have tables of the device that hold some of them too
    there = WeightBytes() if place is None else _load(a, placed, place.packings, place.torch_device, None)
    loaded = _load(a, here, a.resolver.packings_by_layout, a.device.torch_device, a.device)
    a.checkpoint.close()  # nothing more is read, and its pages need not stay in memory
    for group in a.build.groups:
        group.bind()
    return replace(loaded, placed=there.allocated + there.mapped)


def _load(
    a: Assembly, declared: Sequence[Declared], packings: Mapping[str, Packing], where: torch.device,
    pinned: Device | None,
) -> WeightBytes:  # fmt: skip
    """Fill the weights of one place."""
    config = a.config.config

    def load(chosen: Sequence[Declared]) -> WeightBytes:
        if config.load == "dummy":
            a.device.seed(config.seed)
            return _maker("dummy", "load=dummy", "evener-inspection")(chosen, packings, where, config.seed)
        builds = (a.build, *a.other_stages)
        return load_weights(chosen, a.checkpoint, a.scheme, packings, where, builds, pinned_device=pinned)

    if config.model_cache is None:
        return load(declared)
    return _maker("cache", "model_cache=", "evener-formats")(a, declared, packings, where, pinned, load)


def _maker(name: str, key: str, distribution: str) -> Callable[..., WeightBytes]:
    return installed_catalog().need("maker of weights", name, key, distribution, CheckpointError)  # type: ignore[no-any-return]
