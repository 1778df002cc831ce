"""Filling the weights of an assembled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from evener.contracts.declared import Declared, Table
from evener.contracts.device import Device
from evener.contracts.quant import Packing
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.memory import divide_weights
from evener.errors import CheckpointError
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.match import match_context
from evener.plugins.discover import installed_catalog


def load_stage(a: Assembly, tables: bool = True) -> WeightBytes:
    """Fill the weights of this rank's part of the model, from the checkpoint or with random numbers (``load=dummy``).

    Args:
        tables: False: they are filled already.

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape; or no installed package makes weights.
    """
    here, placed = divide_weights(a)
    here = [item for item in here if tables or not isinstance(item, Table)]
    there = WeightBytes()
    if a.placement is not None:  # first: a placement may have tables of the device that hold some of them too
        there = _load(a, placed, here, a.placement.packings, a.placement.torch_device, None)
    loaded = _load(a, here, placed, a.resolver.packings_by_layout, a.device.torch_device, a.device)
    a.checkpoint.close()  # nothing more is read, and its pages need not stay in memory
    for group in a.build.groups:
        group.bind()
    return replace(loaded, placed=there.allocated + there.mapped)


def _load(
    a: Assembly, declared: Sequence[Declared], others: Sequence[Declared], packings: Mapping[str, Packing],
    where: torch.device, pinned: Device | None,
) -> WeightBytes:  # fmt: skip
    """Fill the weights of one place; ``others`` are those of the other."""
    config = a.config.config

    def load(chosen: Sequence[Declared]) -> WeightBytes:
        if config.load == "dummy":
            a.device.seed(config.seed)
            return _maker("dummy", "load=dummy", "evener-inspection")(chosen, packings, where, config.seed)
        context, taken = match_context(a.build, a.other_stages), set(map(id, chosen))
        rest = [each for each in declared if id(each) not in taken]
        context["other_stages"] = [*context["other_stages"], *others, *rest]
        return load_weights(chosen, a.checkpoint, a.scheme, packings, where, pinned_device=pinned, **context)

    if config.model_cache is None:
        return load(declared)
    return _maker("cache", "model_cache=", "evener-formats")(a, declared, packings, where, pinned, load)


def _maker(name: str, key: str, distribution: str) -> Callable[..., WeightBytes]:
    return installed_catalog().need("maker of weights", name, key, distribution, CheckpointError)  # type: ignore[no-any-return]
