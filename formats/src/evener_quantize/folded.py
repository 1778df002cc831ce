"""AWQ's scales of channels in a layer: the columns of matrices are multiplied, and what makes these channels divided.

========================  ==================================================
channels                  made by
========================  ==================================================
inputs of qkv, gate, up   the norm before
inputs of o               the rows of the values; of no kind of latent
inputs of down            the rows of up, if it is a factor (a gated MLP)
========================  ==================================================

Those of experts are in ``folded_experts``. Other matrices get no scales; they are clipped only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.declared import LinearWeight, Weight, WeightGroup
from evener.contracts.weights import AttentionWeights, MLPWeights, MoEWeights
from evener_quantize.awq import channel_scales
from evener_quantize.chosen import Chosen
from evener_quantize.observed import Inputs, Key
from evener_quantize.rounding import Grid
from evener_quantize.stage import Stage


@dataclass(frozen=True)
class _Seam:
    """Channels between a maker and a matrix.

    Attributes:
        reads: the matrix whose columns are the channels.
        norm, offset: the norm that makes them, and what is added to its weight; or
        makes: the matrix that makes them, the first of its rows that do, and their number; bias: its bias.
        repeat: as in ``channel_scales``.
    """

    reads: LinearWeight
    norm: Weight | None = None
    offset: float = 0.0
    makes: LinearWeight | None = None
    first: int = 0
    bias: Weight | None = None
    repeat: tuple[int, int] | None = None


def fold_scales(stage: Stage, seen: Mapping[Key, Inputs], grid: Grid, chosen: Chosen) -> dict[str, torch.Tensor]:
    """Scale what can be scaled, and ``seen`` with it. Returns the changed norms and biases, as they are stored."""
    changed: dict[str, torch.Tensor] = {}
    seams = [seam for seam in _seams(stage) if chosen.has(seam.reads) and (not seam.makes or chosen.has(seam.makes))]
    for seam in seams:
        inputs = seen.get((seam.reads.name, -1))
        if inputs is None or not inputs.count:
            continue
        weight = values_of(seam.reads)
        scales = channel_scales(
            [(weight, inputs.gram / inputs.count)], inputs.magnitudes / inputs.count, grid,
            chosen.group_of(seam.reads.columns), seam.repeat,
        )  # fmt: skip
        if seam.norm is not None:
            scales = divide_norm(stage, seam.norm, seam.offset, scales, changed)
        else:
            assert seam.makes is not None, "a seam has a maker"
            _divide_rows(stage, seam, scales, changed)
        stage.replace(seam.reads, weight * scales)
        inputs.gram /= scales[:, None] * scales
        inputs.magnitudes /= scales
    stage.bind()
    return changed


def query_and_key_rows(stage: Stage) -> dict[str, int]:
    """How many rows of a linear weight make queries and keys; they come first."""
    records = [
        record for site in stage.assembly.build.sites for record in static_records(site.static) if "qkv" in record
    ]
    return {r["qkv"].name: (r["heads"] + r["kv_heads"]) * r["head_dim"] for r in records}


def values_of(weight: LinearWeight) -> torch.Tensor:
    assert weight.value is not None, "the stage is loaded"
    values: torch.Tensor = weight.value.data.float()
    return values


def divide_norm(
    stage: Stage, norm: Weight, offset: float, scales: torch.Tensor, changed: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Divide a norm by ``scales``. Returns the scales by which it is divided as it is stored: its numbers have few
    bits, and what they lose would be lost in every channel."""
    assert norm.value is not None, "the stage is loaded"
    headers = stage.assembly.headers
    kind = getattr(torch, headers[norm.sources[0]][0])
    old = norm.value.float()
    new = old.clone()
    size = len(scales)
    new[:size] = (old[:size] + offset) / scales - offset
    stored = new.to(kind).float()
    exact = (old[:size] + offset) / (stored[:size] + offset)
    scales = torch.where((exact.isfinite()) & (exact > 0), exact, scales)
    if len(new) > size:  # a bias behind the weight
        stored[size:] = (old[size:] / scales).to(kind).float()
    norm.value = stored.to(norm.value.dtype)
    for name, piece in zip(norm.sources, stored.chunk(len(norm.sources)), strict=True):
        changed[name] = piece.to(kind).cpu().contiguous()
    return scales


def _divide_rows(stage: Stage, seam: _Seam, scales: torch.Tensor, changed: dict[str, torch.Tensor]) -> None:
    """Divide the rows that make the channels, and their part of the bias."""
    assert seam.makes is not None, "a seam has a maker"
    if seam.repeat is not None:
        count, width = seam.repeat
        scales = scales.view(-1, count, width)[:, 0].flatten()
    rows = slice(seam.first, seam.first + len(scales))
    weight = values_of(seam.makes).clone()
    weight[rows] /= scales[:, None]
    stage.replace(seam.makes, weight)
    if seam.bias is None:
        return
    assert seam.bias.value is not None, "the stage is loaded"
    bias = seam.bias.value.clone()
    bias[rows] = (bias[rows].float() / scales).to(bias.dtype)
    seam.bias.value = bias
    sizes = [part.rows for part in seam.makes.parts]
    for name, piece in zip(seam.bias.sources, bias.split(sizes), strict=True):
        kind = getattr(torch, stage.assembly.headers[name][0])
        changed[name] = piece.to(kind).cpu().contiguous()


def _seams(stage: Stage) -> Iterator[_Seam]:
    build = stage.assembly.build
    statics = [record for site in build.sites for record in static_records(site.static)]
    weights = [item for item in build.weights if isinstance(item, Weight)]
    for group in build.groups:
        if group.kind is AttentionWeights:
            static = next(each for each in statics if each.get("qkv") is group.fields["qkv"])
            yield from _attention(group, static, weights)
        elif group.kind is MLPWeights:
            static = next(each for each in statics if each.get("gate_up") is group.fields["gate_up"])
            yield from _mlp(group, static, weights)
        elif group.kind is MoEWeights:
            gate_up, down = group.fields.get("shared_gate_up"), group.fields.get("shared_down")
            if isinstance(gate_up, LinearWeight) and isinstance(down, LinearWeight):
                yield _Seam(down, makes=gate_up, first=gate_up.rows // 2)


def static_records(static: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Static parameters, and those of the blocks inside."""
    yield static
    for value in static.values():
        if isinstance(value, Mapping):
            yield from static_records(value)


def own_norm(group: WeightGroup, static: Mapping[str, Any], weights: list[Weight]) -> Weight | None:
    """The norm before a block, if it has weights that nothing else reads."""
    norm = group.fields["norm"]
    if not isinstance(norm, Weight) or norm.make is not None or not static.get("pre_norm", True):
        return None
    shared = sum(bool({*norm.sources} & {*other.sources}) for other in weights) > 1
    return None if shared else norm


def _attention(group: WeightGroup, static: Mapping[str, Any], weights: list[Weight]) -> Iterator[_Seam]:
    qkv, o, bias = (group.fields.get(name) for name in ("qkv", "o", "qkv_bias"))
    assert isinstance(qkv, LinearWeight) and isinstance(o, LinearWeight), "attention has both"
    if (norm := own_norm(group, static, weights)) is not None:
        yield _Seam(qkv, norm=norm, offset=static["offset"])
    heads, kv_heads, width = static["heads"], static["kv_heads"], static["value_dim"]
    first = (heads + kv_heads) * static["head_dim"]
    own = bias if isinstance(bias, Weight) else None
    yield _Seam(o, makes=qkv, first=first, bias=own, repeat=(heads // kv_heads, width))


def _mlp(group: WeightGroup, static: Mapping[str, Any], weights: list[Weight]) -> Iterator[_Seam]:
    gate_up, down, bias = (group.fields.get(name) for name in ("gate_up", "down", "gate_up_bias"))
    assert isinstance(gate_up, LinearWeight) and isinstance(down, LinearWeight), "an MLP has both"
    if (norm := own_norm(group, static, weights)) is not None:
        yield _Seam(gate_up, norm=norm, offset=static["offset"])
    if static["gated"] and static["activation"] != "clamped_swiglu":
        yield _Seam(down, makes=gate_up, first=static["inner"], bias=bias if isinstance(bias, Weight) else None)
