"""Filling the weights of an assembled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from evener.contracts.declared import Declared, Table
from evener.contracts.device import Device
from evener.contracts.quant import Packing
from evener.engine.worker.assembly import Assembly, view_model
from evener.engine.worker.memory import divide_weights
from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.match import check_match, match_context
from evener.plugins.discover import installed_catalog

#: Of ``config.json``: who wrote it, with what.
_OF_THE_WRITER = frozenset({"_name_or_path", "transformers_version"})


def reopen(a: Assembly, folder: str) -> Assembly:
    """The same model with the weights of another folder; nothing is loaded yet.

    Raises:
        CheckpointError: the folder cannot be read, or is not of the same model.
    """
    if a.config.config.load == "dummy":
        raise CheckpointError("this model was started with load=dummy; start it with weights, to replace them")
    checkpoint = open_checkpoint(folder)
    before, after = a.checkpoint.config, checkpoint.config
    names = sorted(k for k in {*before, *after} - _OF_THE_WRITER if before.get(k) != after.get(k))
    if names:
        raise CheckpointError(f"config.json of {folder} differs from the running model's in {', '.join(names[:10])}; "
                              "give weights of the same model")  # fmt: skip
    checkpoint, new, scheme, _ = view_model(a.config, a.loaded, a.ranks, checkpoint, type(a.model))
    old = a.headers
    if other := next((name for name in old if name in new and new[name] != old[name]), None):
        raise CheckpointError(f"{other} is {new[other]} in {folder}, and {old[other]} in the running model; store it "
                              "like that")  # fmt: skip
    check_match(a.build.weights, new, scheme, where=folder, **match_context(a.build, a.other_stages))
    # A model cache holds the weights of the start.
    config = replace(a.config, config=replace(a.config.config, model_cache=None))
    return replace(a, config=config, checkpoint=checkpoint, scheme=scheme, headers=new)


def release(a: Assembly) -> None:
    """Free the weights, and what kernels hold of them and of the state; tables stay."""
    for item in a.build.weights:
        if not isinstance(item, Table):
            item.value = None
    for group in a.build.groups:
        group.values = None
    a.resolver.rebuild(a.build.sites)


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
    loaded = replace(loaded, placed=there.allocated + there.mapped)
    for group in a.build.groups:
        group.bind()
    return loaded


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
    makers = installed_catalog().lazy_imports("maker of weights")
    if name not in makers:
        raise CheckpointError(f"{key} needs a package that is not installed: pip install {distribution}")
    made: Callable[..., WeightBytes] = makers[name].load()
    return made
