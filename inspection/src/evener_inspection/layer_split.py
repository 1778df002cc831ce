"""The layers of stages on unlike devices, divided so that the stages take equal time: by the measured time of one layer
on each device, and by what its memory holds.

A stage with ``n`` layers takes ``n × layer + rest`` seconds a step; ``rest`` is the head, on the last stage. One layer
of the middle of the model is loaded and timed. The time of the head is the layer's, in proportion to their bytes: steps
of few tokens take as long as their weights take to be read.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.contracts.quant import DTYPE_BYTES
from evener.distributed.agreement import Agreement
from evener.distributed.world import World
from evener.engine.sampling.device_tables import DeviceTables
from evener.engine.worker.assembly import Assembly, assemble
from evener.engine.worker.memory import memory_demand
from evener.engine.worker.runner import Runner
from evener.engine.worker.step_layout import StepLayout, one_request
from evener.engine.worker.weights import load_stage
from evener.errors import ConfigError, MemoryPlanError

log = logging.getLogger("evener.worker")
#: Tokens of the step that is timed, and how often.
_TOKENS, _TIMES = 16, 5


@dataclass(frozen=True)
class StageCost:
    """``layer``: time of one layer on a stage's device; ``rest``: of what the stage computes beside its layers, in the
    same unit; ``most``: layers that its memory holds."""

    layer: int
    rest: int
    most: int


def split_layers(count: int, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """How many of ``count`` layers each stage gets, at least one, so that the slowest stage takes the least time.

    Each layer goes to the stage that has the smallest time with it; of equal ones, to the first. That is the best
    division, because all layers take a device the same time.

    Raises:
        MemoryPlanError: the stages' memory does not hold so many.
    """
    held = [1] * len(costs)
    while sum(held) < count:
        able = [stage for stage, cost in enumerate(costs) if held[stage] < cost.most]
        if not able:
            most = ", ".join(str(max(0, cost.most)) for cost in costs)
            raise MemoryPlanError(f"the stages hold at most {most} of the model's {count} layers: lower infer.max_reqs "
                                  "or infer.max_seq_len, or add a stage with infer.stages")  # fmt: skip
        held[min(able, key=lambda stage: costs[stage].rest + (held[stage] + 1) * costs[stage].layer)] += 1
    return tuple(held)


def measured_split(config: Config, search: BackendSearch, a: Assembly) -> tuple[int, ...]:
    """How many layers each stage gets. All ranks call it at the same time, each with its own part ``a`` of a model
    whose layers are divided equally.

    Raises:
        ConfigError: only some layers are to run. MemoryPlanError: the stages' memory does not hold all layers.
    """
    if config.infer.layers:
        raise ConfigError("infer.layers, with stages on unlike devices, needs infer.pp_layer_partition: set it to a "
                          "number of these layers for each stage")  # fmt: skip
    count = max(build.held.stop for build in (a.build, *a.other_stages))
    slowest = Agreement(a.ranks.tp, a.device.torch_device).most(_measure(config, search, a, count))
    costs = [StageCost(layer, rest, -most) for layer, rest, most in a.agreement.each(slowest)]
    partition = split_layers(count, costs)
    for stage, (cost, layers) in enumerate(zip(costs, partition, strict=True) if a.ranks.world.rank == 0 else ()):
        log.info("stage %d: a layer takes %d µs, the rest %d µs, at most %d layers fit: it gets %d", stage,
                 cost.layer // 1000, cost.rest // 1000, cost.most, layers)  # fmt: skip
    return partition


def _measure(config: Config, search: BackendSearch, a: Assembly, count: int) -> list[int]:
    """This rank's ``StageCost``: nanoseconds of a layer and of the rest, and minus the number of layers that fit."""
    middle, world, resolved = count // 2, a.ranks.world, a.config
    infer = replace(
        config.infer, stages=(), pp_size=3, pp_layer_partition=(str(middle), "1", str(count - middle - 1)),
        block_size=a.geometry.block_size, max_reqs=resolved.max_reqs, max_seq_len=resolved.max_seq_len,
        step_tokens=resolved.step_tokens,
    )  # fmt: skip
    alone = World.of(world.tp_size + world.tp_rank, world.tp_size, 3)
    groups = replace(a.ranks, world=alone, pp=None, ids=None)
    one = assemble(replace(config, dtype=resolved.dtype, infer=infer), search, ranks=groups)
    free, whole, demand = a.device.memory().free, memory_demand(a, resolved), memory_demand(one, resolved)
    layer, held = demand.weights.allocated + demand.weights.mapped, len(a.build.held)
    # While a weight is packed, copies of it lie beside it: a layer's bytes are room enough for them.
    rest = free - layer - max(0, whole.fixed - held * demand.weights.allocated)
    most = rest // (layer + demand.least_state)
    seconds = _time_layer(one)
    head = a.model.vocab_size * a.model.hidden_size * DTYPE_BYTES[resolved.dtype] / world.tp_size
    after = seconds * head / layer if world.last_stage else 0.0
    del one
    gc.collect()  # an assembly has cycles, and its weights are on the device
    return [max(1, round(1e9 * seconds)), round(1e9 * after), -int(most)]


def _time_layer(one: Assembly) -> float:
    """Seconds of the only layer of a stage, for a step of a few tokens."""
    device, tokens = one.device, min(_TOKENS, one.config.step_tokens, one.config.max_seq_len)
    load_stage(one)
    pool = one.geometry.bind(1, device)
    tables = DeviceTables(device, 1, one.config.max_seq_len, one.geometry.spans, one.geometry.block_size)
    runner = Runner(device, one.model, one.sampler, tables, one.geometry, one.adapters)
    plan = one_request(tokens, len(one.geometry.groups), one.geometry.block_size)
    with torch.inference_mode():
        runner.apply(plan)
        layout = StepLayout(plan)
        step = runner.step(layout, layout.upload(device))

        def forward() -> None:
            stream = torch.zeros(tokens, one.model.hidden_size, dtype=torch.float32, device=device.torch_device)
            step.stream = torch.zeros_like(stream, dtype=getattr(torch, one.config.dtype)), stream
            one.model.forward(step)

        forward()  # kernels may be built in it
        device.readback(tables.tokens).wait()  # ends the step
        seconds = min(device.measure(forward) for _ in range(_TIMES))
    del pool
    return seconds
