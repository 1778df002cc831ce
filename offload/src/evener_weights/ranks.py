"""The weights of one rank: checked, released and read again while no step is in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from evener.contracts.declared import Table
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.plan import StepResult
from evener.engine.worker.assembly import Assembly, view_model
from evener.engine.worker.weights import load_stage
from evener.engine.worker.worker import Worker
from evener.errors import CheckpointError, EvenerError
from evener.loading.checkpoint import open_checkpoint
from evener.loading.match import check_match
from evener.resolution.resolver import Resolver

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
    check_match(a.build.weights, new, scheme, (a.build, *a.other_stages), folder)
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
    # The callables of the sites may hold weights of their last call. The manifest stays as it is.
    again = Resolver(a.resolver.available)
    again.sites(a.build.sites)
    a.resolver.tables, a.resolver.attribution = again.tables, again.attribution


class Answer(PendingStep):
    """What a rank has done: ``error`` says why it could not."""

    every_rank = True

    def __init__(self, error: str | None) -> None:
        self._error = error

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult(plan=-1, error=self._error)


def change(worker: Worker, action: str, folder: str) -> str | None:
    """Check, load or release weights. Returns why it could not; after a load that failed, another must follow."""
    a = worker.assembly
    try:
        others = {"experts are in host memory": a.placement, "a model proposes tokens": worker.drafter,
                  "infer.kv_host_memory or offload.kv_transfer is set": worker.mover}  # fmt: skip
        if what := next((what for what, other in others.items() if other is not None), None):
            raise CheckpointError(f"weights cannot be changed or released while {what}; start the engine again")
        source = reopen(a, folder) if folder else a
        if action != "check":
            worker.graphs = None  # captures hold the addresses of weights and state
            release(a)  # before others are loaded: there is not room for both
        if action == "release":
            worker.pool = None
            a.geometry.bind(1, a.device)
            a.device.synchronize()
            cache: Any = getattr(torch, a.device.torch_device.type, None)
            if hasattr(cache, "empty_cache"):  # torch keeps freed memory of some devices
                cache.empty_cache()
        if action == "load":
            load_stage(source)
            worker.pool = a.geometry.bind(worker.facts.slabs, a.device) if worker.pool is None else worker.pool
            worker.graphs = worker.step_graphs(a, worker.runner)
    except (EvenerError, OSError) as error:
        return str(error)
    return None
