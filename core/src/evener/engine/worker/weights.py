"""Filling the weights of an assembled model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from evener.contracts.declared import Declared
from evener.contracts.device import Device
from evener.contracts.quant import Packing
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.memory import divide_weights
from evener.errors import CheckpointError
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.match import match_context
from evener.plugins.discover import installed_catalog


def load_stage(a: Assembly) -> WeightBytes:
    """Fill the weights of this rank's part of the model, from the checkpoint or with random numbers (``load=dummy``).

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape; or no installed package makes weights.
    """
    here, placed = divide_weights(a)
    there = WeightBytes()
    if a.placement is not None:  # first: a placement may have tables of the device that hold some of them too
        there = _load(a, placed, here, a.placement.packings, a.placement.torch_device, None)
    loaded = _load(a, here, placed, a.resolver.packings_by_layout, a.device.torch_device, a.device)
    loaded = replace(loaded, placed=there.allocated + there.mapped)
    for group in a.build.groups:
        group.bind()
    return loaded


def _load(
    a: Assembly, declared: Sequence[Declared], others: Sequence[Declared], packings: Mapping[str, Packing],
    where: torch.device, pinned: Device | None,
) -> WeightBytes:  # fmt: skip
    """Fill the weights of one place; ``others`` are those of the other."""
    if a.config.config.load == "dummy":
        makers = installed_catalog().lazy_imports("maker of weights")
        if "dummy" not in makers:
            raise CheckpointError("load=dummy needs a package that is not installed: pip install evener-inspection")
        a.device.seed(a.config.config.seed)
        filled: WeightBytes = makers["dummy"].load()(declared, packings, where, a.config.config.seed)
        return filled
    context = match_context(a.build, a.other_stages)
    context["other_stages"] = [*context["other_stages"], *others]
    return load_weights(declared, a.checkpoint, a.scheme, packings, where, pinned_device=pinned, **context)
