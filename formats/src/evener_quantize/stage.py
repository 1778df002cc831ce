"""One layer of a model, assembled and loaded as a pipeline stage of one layer, that runs windows of tokens one after
another. Nothing of the other layers is in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.contracts.declared import LinearWeight
from evener.distributed.world import RankGroups, World
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.inputs.step_layout import StepLayout
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.engine.worker.assembly import Assembly, assemble
from evener.engine.worker.runner import Runner
from evener.engine.worker.weights import load_stage
from evener.resolution.resolver import Resolver
from evener_quantize.observed import Observer


def stage_config(config: Config, layers: int, window: int) -> Config:
    """The configuration of a model of ``layers`` layers whose stages have one layer each and run ``window`` tokens."""
    partition = ("1",) * layers if layers > 1 else ()
    infer = replace(
        config.infer, pp_size=layers, pp_layer_partition=partition, max_reqs=1, max_seq_len=max(2, window),
        step_tokens=max(2, window), op_impl="ref", use_cuda_graph=False, mla_absorb="none",
    )  # fmt: skip
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return replace(config, infer=infer, dtype=dtype, model_cache=None)


class Stage:
    """Layer number ``index`` of ``count``, loaded in the plain packing.

    Args:
        config: of ``stage_config``.
        observer: sees the inputs of linear weights.

    Raises:
        EvenerError: as starting an engine would.
    """

    def __init__(self, config: Config, search: BackendSearch, index: int, count: int, observer: Observer) -> None:
        self.assembly: Assembly = assemble(config, search, ranks=RankGroups(World.of(index, 1, count)))
        a, self.observer = self.assembly, observer
        load_stage(a)
        # All other ops are the reference's, by op_impl.
        available = replace(a.resolver.available, kernels=observer.kernels(), reference_ops="", forced={})
        Resolver(available).sites(a.build.sites)
        length, size = a.config.max_seq_len, a.geometry.block_size
        tables = DeviceTables(a.device, 1, length, a.geometry.spans, size)
        self._runner = Runner(a.device, a.model, a.sampler, tables, a.geometry, a.adapters)
        columns, groups = -(-length // size), len(a.geometry.groups)
        pages = math.lcm(*(group.cut for group in a.geometry.groups))
        # Slab 0 is the null block's.
        self._blocks = [[(1 + column * groups + g) * pages for column in range(columns)] for g in range(groups)]
        self._state = a.geometry.bind(1 + columns * groups, a.device)

    @property
    def linear(self) -> list[LinearWeight]:
        """Its linear weights."""
        return [each for each in self.assembly.build.weights if isinstance(each, LinearWeight)]

    def run(self, tokens: Sequence[int], stream: torch.Tensor) -> torch.Tensor:
        """The stream behind this layer, float32 [T, hidden], of a window of ``tokens`` and the ``stream`` before it,
        which the first layer does not read."""
        a = self.assembly
        plan = Plan(
            id=-1, admissions=[Admission(0, list(tokens), Sampling(temperature=0.0))],
            updates=[TableUpdate(0, 0, self._blocks)], slots=[0], starts=[0], counts=[len(tokens)],
        )  # fmt: skip
        with torch.inference_mode():
            self._runner.apply(plan)
            layout = StepLayout(plan, self._runner.tables)
            step = self._runner.step(layout, layout.upload(a.device))
            if not a.build.first_stage:
                residual = stream.to(a.device.torch_device, copy=True)  # ops may overwrite it
                step.stream = torch.zeros_like(residual, dtype=getattr(torch, a.config.dtype)), residual
            return a.model.forward(step).cpu()

    def replace(self, weight: LinearWeight, values: torch.Tensor) -> None:
        """Compute with other ``values`` [(experts,) rows, columns] from now on."""
        assert weight.value is not None, "the stage is loaded"
        kind, where = getattr(torch, self.assembly.config.dtype), self.assembly.device.torch_device
        weight.value = replace(weight.value, data=values.to(device=where, dtype=kind))

    def bind(self) -> None:
        """Give the ops what was replaced."""
        for group in self.assembly.build.groups:
            group.bind()
