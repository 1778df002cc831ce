"""How long each kind of a model's layers takes on each stage's device, and how many fit: measured at the start, and
kept for the next one.

One layer of each kind is loaded and timed, with a step of a few tokens, and on the last stage the head. Times are kept
in the user's cache folder under a fingerprint of what they depend on: device, versions, the shapes and formats of the
layers, the keys that choose kernels. A later start measures again only if that has changed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.contracts.declared import LinearWeight, Weight
from evener.distributed.agreement import Agreement
from evener.distributed.world import World
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.inputs.step_layout import StepLayout
from evener.engine.worker.assembly import Assembly, StoredModel, assemble, declare_model
from evener.engine.worker.memory import KEPT_FREE, memory_demand
from evener.engine.worker.runner import Runner
from evener.engine.worker.weights import load_stage
from evener.errors import ConfigError
from evener.folders.cache import cache_folder, is_trusted, make_private
from evener.layers.builder import Builder
from evener.loading.estimate import WeightEstimate
from evener.plugins.discover import core_version
from evener_inspection.layer_split import Layers, StageCost, split_layers, stage_times

log = logging.getLogger("evener.worker")
#: Tokens of the step that is timed, and how often.
_TOKENS, _TIMES = 16, 5
#: Bytes of a kept file: a few numbers.
_MOST_BYTES = 1 << 16


class Division(NamedTuple):
    """How many layers each stage gets, and why: a line for each stage."""

    partition: tuple[int, ...]
    lines: list[str]


def measured_split(config: Config, search: BackendSearch, a: Assembly, measure: bool = True) -> Division | None:
    """How many layers each stage gets. All ranks call it at the same time, each with its own part ``a`` of a model
    whose layers are divided equally.

    Args:
        measure: False: only times that an earlier start has kept are used; None is returned if a stage has none.

    Raises:
        ConfigError: only some layers are to run. MemoryPlanError: the stages' memory does not hold all layers.
    """
    if a.config.config.infer.layers:
        raise ConfigError("infer.layers, with stages on unlike devices, needs infer.pp_layer_partition: set it to a "
                          "number of these layers for each stage")  # fmt: skip
    tp = Agreement(a.ranks.tp, a.device.torch_device)
    model = _declared_layers(a)
    kept = _Kept.of(a, model)
    found = kept.load()
    # Ranks that share layers time them together: all measure, or none.
    have = tp.least([found is not None])[0]
    if not measure and not a.agreement.least([have])[0]:
        return None
    seconds = found if found is not None and have else _measure(config, search, a, model)
    if not have and a.ranks.world.tp_rank == 0:
        kept.store(seconds)
    mine = tp.most([*_nanoseconds(seconds), *_bytes(config, search, a, model)])
    kinds = len(model.signatures)
    costs = [StageCost(row[:kinds], row[kinds], row[kinds + 1 : -2], row[-2], -row[-1])
             for row in a.agreement.each(mine)]  # fmt: skip
    partition = split_layers(model.layers, costs)
    lines = _lines(partition, model.layers, costs)
    for line in lines if a.ranks.world.rank == 0 else ():
        log.info("%s", line)
    return Division(partition, lines)


def _lines(partition: Sequence[int], layers: Layers, costs: Sequence[StageCost]) -> list[str]:
    times, lines = stage_times(partition, layers, costs), []
    for stage, (cost, many, time) in enumerate(zip(costs, partition, times, strict=True)):
        each = " or ".join(f"{one / 1000:.0f}" for one in cost.times)
        head = f", the head {cost.rest / 1000:.0f} µs" if cost.rest else ""
        lines.append(f"stage {stage}: a layer takes {each} µs{head}, at most {cost.most(layers)} layers fit: it gets "
                     f"{many}, {time / 1000:.0f} µs a step")  # fmt: skip
    return lines


# The model's layers.


@dataclass(frozen=True)
class _DeclaredLayers:
    """``signatures``: of each kind, what tells it from others; ``examples``: of each kind, the number of a layer, in
    the middle of the model if possible."""

    layers: Layers
    signatures: list[str]
    examples: list[int]


def _declared_layers(a: Assembly) -> _DeclaredLayers:
    """Each layer is declared as a stage of its own, and compared with the others."""
    count = max(build.held.stop for build in (a.build, *a.other_stages))
    infer = replace(a.config.config.infer, stages=(), pp_size=count, pp_layer_partition=("1",) * count)
    config, world = replace(a.config, config=replace(a.config.config, infer=infer)), a.ranks.world
    ranks = replace(a.ranks, world=World.of(world.tp_rank, world.tp_size, count), pp=None, ids=None)
    stored = StoredModel(a.checkpoint, a.headers, a.scheme, type(a.model))
    kinds: dict[str, list[int]] = {}
    states: dict[str, int] = {}
    state_of = []
    for at in range(count):
        build, _ = declare_model(config, ranks, stored, at, a.build.head)
        kinds.setdefault(_signature(build, at), []).append(at)
        slots = repr([(slot.spec, slot.attention) for slot in build.slots])
        state_of.append(states.setdefault(slots, len(states)) if build.slots else -1)
    number = {at: kind for kind, layers in enumerate(kinds.values()) for at in layers}
    examples = [next((at for at in layers if 0 < at < count - 1), layers[0]) for layers in kinds.values()]
    return _DeclaredLayers(Layers([number[at] for at in range(count)], state_of), list(kinds), examples)


def _weights_of(build: Builder, layer: int) -> list[Weight | LinearWeight]:
    """The weights of a layer: they have its number in their names."""
    number = re.compile(rf"(?<!\d){layer}(?!\d)")
    return [w for w in build.weights if isinstance(w, (Weight, LinearWeight)) and number.search(w.name)]


def _signature(build: Builder, layer: int) -> str:
    """Shapes and formats of a layer's weights, and its state."""
    rows: list[Any] = []
    for w in _weights_of(build, layer):
        if isinstance(w, LinearWeight):
            rows.append((w.experts, w.dtype, [(part.rows, part.columns, part.format) for part in w.parts]))
        else:
            rows.append((w.shape, w.dtype))
    return repr((rows, [(slot.spec, slot.attention) for slot in build.slots]))


# Times.


def _nanoseconds(seconds: Sequence[float]) -> list[int]:
    *layers, head = (round(1e9 * each) for each in seconds)
    return [*(max(1, each) for each in layers), head]


def _measure(config: Config, search: BackendSearch, a: Assembly, model: _DeclaredLayers) -> list[float]:
    """Seconds of a layer of each kind, and of the head if this is the last stage."""
    seconds = []
    for layer in model.examples:
        seconds.append(_time(_alone(config, search, a, layer), head=False))
        gc.collect()  # an assembly has cycles, and its weights are on the device
    head = 0.0
    if a.ranks.world.last_stage and a.pooling is None:
        head = _time(_alone(config, search, a, len(model.layers.kinds) - 1), head=True)
        gc.collect()
    return [*seconds, head]


def _alone(config: Config, search: BackendSearch, a: Assembly, layer: int) -> Assembly:
    """The model's part with one layer, as this stage's device would run it."""
    count, world, resolved = max(b.held.stop for b in (a.build, *a.other_stages)), a.ranks.world, a.config
    partition = [each for each in (layer, 1, count - layer - 1) if each]
    stage = int(layer > 0)
    infer = replace(
        config.infer, stages=(), pp_size=len(partition), pp_layer_partition=tuple(map(str, partition)),
        block_size=a.geometry.block_size, max_reqs=resolved.max_reqs, max_seq_len=resolved.max_seq_len,
        step_tokens=resolved.step_tokens,
    )  # fmt: skip
    alone = World.of(stage * world.tp_size + world.tp_rank, world.tp_size, len(partition))
    groups = replace(a.ranks, world=alone, pp=None, ids=None)
    return assemble(replace(config, dtype=resolved.dtype, infer=infer), search, ranks=groups)


def _time(one: Assembly, head: bool) -> float:
    """Seconds of a stage's only layer for a step of a few tokens, or of its head."""
    device, tokens = one.device, min(_TOKENS, one.config.step_tokens, one.config.max_seq_len)
    load_stage(one)
    one.geometry.bind(1, device)
    tables = DeviceTables(device, 1, one.config.max_seq_len, one.geometry.spans, one.geometry.block_size)
    runner = Runner(device, one.model, one.sampler, tables, one.geometry, one.adapters)
    plan = one.geometry.one_request(tokens)
    with torch.inference_mode():
        runner.apply(plan)
        layout = StepLayout(plan, tables)
        step = runner.step(layout, layout.upload(device))
        zeros = torch.zeros(tokens, one.model.hidden_size, dtype=torch.float32, device=device.torch_device)
        rows = zeros.to(getattr(torch, one.config.dtype))

        def forward() -> None:
            step.stream = rows.clone(), zeros.clone()
            one.model.forward(step)

        def logits() -> None:
            runner.logits(zeros[: one.config.max_reqs], step)  # hidden states are float32 there

        work: Callable[[], None] = logits if head else forward
        work()  # kernels may be built in it
        device.readback(tables.tokens).wait()  # ends the step
        return min(device.measure(work) for _ in range(_TIMES))


# Memory.


def _bytes(config: Config, search: BackendSearch, a: Assembly, model: _DeclaredLayers) -> list[int]:
    """Of a ``StageCost``: the bytes of a layer of each kind, of state, and minus the room."""
    weights, state = list[WeightEstimate](), 0
    for layer in model.examples:
        one = _alone(config, search, a, layer)
        if one.build.slots:
            state = max(state, memory_demand(one, a.config).least_state)
        build = copy(one.build)
        build.weights = [*_weights_of(one.build, layer)]
        weights.append(memory_demand(replace(one, build=build), a.config).weights)
    sizes = [each.allocated + each.mapped for each in weights]
    own = sum(weights[model.layers.kinds[at]].allocated for at in a.build.held)
    # While a weight is packed, copies of it lie beside it: a layer's bytes are room enough for them.
    rest = max(sizes) + max(0, memory_demand(a, a.config).fixed - own)
    return [*sizes, state, rest - int((1 - KEPT_FREE) * a.device.memory().free)]


# Times of an earlier start.


@dataclass(frozen=True)
class _Kept:
    """The file in which times are kept: ``count`` numbers."""

    path: Path
    count: int

    @classmethod
    def of(cls, a: Assembly, model: _DeclaredLayers) -> _Kept:
        """For this device and model."""
        asked, infer, available = a.config.config, a.config.config.infer, a.resolver.available
        packages = sorted({(each.package, each.version) for each in (*available.kernels, *available.states)})
        depends = [
            1, core_version(), torch.__version__, a.device.name, a.device.capabilities.variant,
            sorted(a.device.conditions().items()), packages, a.config.dtype, a.config.threads, a.ranks.world.tp_size,
            a.ranks.world.last_stage, a.model.vocab_size, a.model.hidden_size, a.checkpoint.architecture,
            model.signatures, sorted(asked.ops.items()), sorted(asked.options.items()), asked.load, infer.attn_type,
            infer.op_impl, infer.kv_dtype, infer.mla_absorb, infer.tuning, a.config.step_tokens, a.config.max_seq_len,
        ]  # fmt: skip
        name = hashlib.sha256(repr(depends).encode()).hexdigest()
        return cls(cache_folder("layer-times") / f"{name}.json", len(model.signatures) + 1)

    def load(self) -> list[float] | None:
        """The seconds, if an earlier start has kept them."""
        try:
            if not is_trusted(self.path):
                return None
            with open(self.path, "rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("times of layers are measured again: %s cannot be read (%s)", self.path, error)
            return None
        seconds = found if isinstance(found, list) and len(found) == self.count else []
        return seconds if seconds and all(isinstance(s, float) and 0 <= s < 1e6 for s in seconds) else None

    def store(self, seconds: Sequence[float]) -> None:
        """Keep them."""
        new = self.path.with_suffix(f".{os.getpid()}.{id(self)}")
        try:
            make_private(self.path.parent)
            new.write_text(json.dumps(list(seconds)))
            new.replace(self.path)
        except OSError as error:
            log.warning("times of layers are not kept: %s", error)
