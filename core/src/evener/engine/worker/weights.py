"""Filling the weights of an assembled model."""

from __future__ import annotations

from evener.engine.worker.assembly import Assembly
from evener.errors import CheckpointError
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.match import match_context
from evener.plugins.discover import installed_catalog


def load_stage(a: Assembly) -> WeightBytes:
    """Fill the weights of this rank's part of the model, from the checkpoint or with random numbers (``load=dummy``).

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape; or no installed package makes weights.
    """
    where, config = a.device.torch_device, a.config.config
    if config.load == "dummy":
        makers = installed_catalog().lazy_imports("maker of weights")
        if "dummy" not in makers:
            raise CheckpointError("load=dummy needs a package that is not installed: pip install evener-inspection")
        a.device.seed(config.seed)
        fill_dummy = makers["dummy"].load()
        loaded: WeightBytes = fill_dummy(a.build.weights, a.resolver.packings_by_layout, where, config.seed)
    else:
        loaded = load_weights(
            a.build.weights, a.checkpoint, a.scheme, a.resolver.packings_by_layout, where,
            pinned_device=a.device, **match_context(a.build, a.other_stages),
        )  # fmt: skip
    for group in a.build.groups:
        group.bind()
    return loaded
