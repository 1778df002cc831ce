"""AWQ's scales of channels in a layer of experts.

The inputs of the gate and up projections of all experts, and of the shared ones, are made by one norm, which the router
reads, too: they get the same scales, and the router's columns, which are not quantized, are multiplied by them. The
inputs of an expert's down projection are made by the rows of its own up projection: each expert has its own scales. An
expert that the text never reached has none: its down projection is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from evener.contracts.declared import LinearWeight, StackedWeight, Weight
from evener.contracts.weights import MoEWeights
from evener_quantize.awq import channel_scales
from evener_quantize.chosen import Chosen
from evener_quantize.folded import divide_norm, own_norm, static_records, values_of
from evener_quantize.observed import Inputs, Key
from evener_quantize.rounding import Grid
from evener_quantize.stage import Stage


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer, and what else reads their inputs.

    Attributes:
        norm, offset: the norm that makes the inputs, and what is added to its weight; None if others read it, too.
        router: sees the inputs of all experts.
        gate_up, down: the stacks; rows of up begin at ``inner``.
        shared: gate and up of the shared experts, and their gate.
        separate: whether an up projection is a factor of what its down projection reads, and has no bias.
    """

    norm: Weight | None
    offset: float
    router: LinearWeight
    gate_up: StackedWeight
    down: StackedWeight
    inner: int
    shared: tuple[LinearWeight, ...]
    separate: bool


def keys_before(stage: Stage, chosen: Chosen) -> dict[Key, int]:
    """What is seen before scales are folded into norms: the inputs of routers, and how many rows each expert gets."""
    found: dict[Key, int] = {}
    for each in _layers_of_experts(stage):
        if _folds_norm(each, chosen):
            found[each.router.name, -1] = each.router.columns
            found |= {(each.gate_up.name, expert): 0 for expert in range(each.gate_up.experts)}
    return found


def fold_norms(stage: Stage, seen: Mapping[Key, Inputs], grid: Grid, chosen: Chosen) -> dict[str, torch.Tensor]:
    """Scale the inputs of experts, and ``seen`` with them. Returns the changed norms and the matrices that are not
    quantized, as they are stored."""
    changed: dict[str, torch.Tensor] = {}
    for each in _layers_of_experts(stage):
        inputs = seen.get((each.router.name, -1))
        if not _folds_norm(each, chosen) or inputs is None or not inputs.count:
            continue
        gram, stack = inputs.gram / inputs.count, values_of(each.gate_up)
        counts = [seen[each.gate_up.name, expert].count for expert in range(each.gate_up.experts)]
        if not chosen.has(each.gate_up):
            counts = [0] * len(counts)
        read = [(stack[n], count / inputs.count) for n, count in enumerate(counts) if count]
        read += [(values_of(weight), 1.0) for weight in each.shared if chosen.has(weight)]
        scales = channel_scales(
            [(weight, gram) for weight, _ in read], inputs.magnitudes / inputs.count, grid,
            chosen.group_of(each.gate_up.columns), shares=[share for _, share in read],
        )  # fmt: skip
        assert each.norm is not None, "a norm that is folded into"
        scales = divide_norm(stage, each.norm, each.offset, scales, changed)
        for weight in (each.router, each.gate_up, *each.shared):
            stage.replace(weight, values_of(weight) * scales)
            if not chosen.has(weight):
                changed |= _as_stored(stage, weight)
            if (own := seen.get((weight.name, -1))) is not None:
                own.gram /= scales[:, None] * scales
                own.magnitudes /= scales
    stage.bind()
    return changed


def fold_down(stage: Stage, seen: Mapping[Key, Inputs], grid: Grid, chosen: Chosen) -> None:
    """Scale the inputs of the down projections that were ``seen``, and what is seen of them."""
    for each in _layers_of_experts(stage):
        if not (each.separate and chosen.has(each.gate_up) and chosen.has(each.down)):
            continue
        experts = [n for n in range(each.down.experts) if (i := seen.get((each.down.name, n))) is not None and i.count]
        if not experts:
            continue
        gate_up, down = values_of(each.gate_up).clone(), values_of(each.down).clone()
        for expert in experts:
            inputs = seen[each.down.name, expert]
            scales = channel_scales(
                [(down[expert], inputs.gram / inputs.count)], inputs.magnitudes / inputs.count, grid,
                chosen.group_of(each.down.columns),
            )  # fmt: skip
            gate_up[expert, each.inner :] /= scales[:, None]
            down[expert] *= scales
            inputs.gram /= scales[:, None] * scales
            inputs.magnitudes /= scales
        stage.replace(each.gate_up, gate_up)
        stage.replace(each.down, down)
    stage.bind()


def _folds_norm(experts: _Experts, chosen: Chosen) -> bool:
    return experts.norm is not None and any(chosen.has(weight) for weight in (experts.gate_up, *experts.shared))


def _layers_of_experts(stage: Stage) -> Iterator[_Experts]:
    build = stage.assembly.build
    statics: list[Mapping[str, Any]] = [record for site in build.sites for record in static_records(site.static)]
    weights = [item for item in build.weights if isinstance(item, Weight)]
    for group in build.groups:
        if group.kind is not MoEWeights:
            continue
        fields = group.fields
        router, gate_up, down = (fields[name] for name in ("router", "gate_up", "down"))
        static = next(each for each in statics if each.get("router") is router)
        assert isinstance(router, LinearWeight), "experts have a router"
        assert isinstance(gate_up, StackedWeight) and isinstance(down, StackedWeight), "experts are stacks"
        shared = [fields.get(name) for name in ("shared_gate_up", "shared_gate")]
        separate = static["activation"] != "clamped_swiglu" and fields.get("gate_up_bias") is None
        yield _Experts(
            own_norm(group, static, weights), static["offset"], router, gate_up, down, static["inner"],
            tuple(weight for weight in shared if isinstance(weight, LinearWeight)), separate,
        )  # fmt: skip


def _as_stored(stage: Stage, weight: LinearWeight) -> dict[str, torch.Tensor]:
    """A weight that is not quantized, as the checkpoint stores it. What the stage computes with loses the same bits."""
    headers, values = stage.assembly.headers, values_of(weight)
    found: dict[str, torch.Tensor] = {}
    for expert in range(weight.experts) if isinstance(weight, StackedWeight) else (-1,):
        one, at = (values[expert] if weight.experts else values), 0
        for part in weight.parts:
            name = part.name.format(expert)
            stored = one[at : at + part.rows].to(getattr(torch, headers[name][0]))
            one[at : at + part.rows] = stored
            found[name] = stored.cpu().contiguous()
            at += part.rows
    assert weight.value is not None, "the stage is loaded"
    weight.value = replace(weight.value, data=values.to(weight.value.data.dtype))
    return found
