"""The layers of a model by kind, and the bytes that a decode step reads of each; no weight is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.contracts.declared import Declared, LinearWeight, StackedWeight, Table, Weight
from evener.contracts.quant import DTYPE_BYTES
from evener.contracts.state import StateSpec
from evener_inspection.explanation import planned_ranks

if TYPE_CHECKING:
    from evener.engine.worker.assembly import Assembly

_NUMBERED = re.compile(r"(.*?\.)(\d+)(\..*)")


@dataclass(frozen=True)
class LayerFacts:
    """One layer as the first rank holds it.

    Attributes:
        kind: what layers of equal weights and state have in common, for a person: "full attention, experts".
        weights: bytes that every step reads.
        experts: number of routed experts of this rank, 0: none; expert: bytes of one; top: how many a token chooses.
        states: the layer's states.
        everywhere: number of routed experts of all ranks; 0: as many.
    """

    number: int
    kind: str
    weights: int
    experts: int
    expert: int
    top: int
    states: tuple[StateSpec, ...]
    everywhere: int = 0

    def weight_bytes(self, requests: int) -> float:
        """Bytes of weights that a decode step of so many requests reads. Of the experts those that are expected to be
        chosen if all are equally likely."""
        missed = (1 - self.top / (self.everywhere or self.experts)) ** requests if self.experts else 1.0
        return self.weights + self.experts * self.expert * (1 - missed)

    def state_bytes(self, requests: int, context: int) -> int:
        """Bytes of state that a decode step reads at most, if every request has ``context`` tokens."""
        total = 0
        for spec in self.states:
            read = min(context, spec.window or context) if spec.per == "token" else 1
            total += spec.nbytes * read * requests
        return total


@dataclass(frozen=True)
class ModelFacts:
    """A model.

    Attributes:
        layers: all of them, ascending.
        head: bytes of the matrices that a step reads beside them.
        positions: tokens of the longest request.
    """

    layers: tuple[LayerFacts, ...]
    head: int
    positions: int

    def kinds(self) -> dict[str, list[int]]:
        """The numbers of the layers of each kind."""
        found: dict[str, list[int]] = {}
        for layer in self.layers:
            found.setdefault(layer.kind, []).append(layer.number)
        return found


def model_facts(config: Config) -> ModelFacts:
    """The layers of the whole model, also if ``config`` runs only some of them.

    Raises:
        EvenerError: as when the engine starts; but it need not fit into memory.
    """
    infer = replace(config.infer, layers=(), pp_size=1, pp_layer_partition=(), stages=(), drafter="none",
                    draft_model=None, cpu_layer_num=0, host_experts=(), resident_experts=0)  # fmt: skip
    a = planned_ranks(replace(config, infer=infer), BackendSearch(config.backend))[0]
    layers: dict[int, list[Declared]] = defaultdict(list)
    states: dict[int, list[StateSpec]] = defaultdict(list)
    prefix, head = "", 0
    for slot in a.build.slots:
        if (match := _NUMBERED.fullmatch(slot.name)) is not None and int(match[2]) < a.build.held.stop:
            prefix = match[1]
            states[int(match[2])].append(slot.spec)
    for item in (each for each in a.build.weights if not isinstance(each, Table)):
        match = _NUMBERED.fullmatch(item.name)
        if match is not None and match[1] == prefix:
            layers[int(match[2])].append(item)
        elif isinstance(item, LinearWeight) and item.op != "embedding":  # of a table, few rows are read
            head += _bytes(a, item)
    tops = {int(m[2]): site.static["top"] for site in a.build.sites if site.op == "moe_block"
            and (m := _NUMBERED.fullmatch(site.path)) is not None}  # fmt: skip
    kinds = _Kinds()
    made = []
    for number in a.build.held:
        stacks = [item for item in layers[number] if isinstance(item, StackedWeight)]
        plain = [item for item in layers[number] if not isinstance(item, StackedWeight)]
        made.append(LayerFacts(
            number, kinds.name(layers[number], states[number]), sum(_bytes(a, item) for item in plain),
            stacks[0].experts if stacks else 0, sum(_bytes(a, item) for item in stacks), tops.get(number, 0),
            tuple(states[number]), stacks[0].held.whole if stacks else 0,
        ))  # fmt: skip
    return ModelFacts(tuple(made), head, a.model.max_positions)


def _bytes(a: Assembly, item: Declared) -> int:
    """Bytes of a weight on this rank; of a stack, of one matrix."""
    if isinstance(item, LinearWeight):
        return a.resolver.packings_by_layout[item.layout].nbytes(item.parts, item.dtype)
    return int(prod(item.shape) * DTYPE_BYTES[item.dtype]) if isinstance(item, Weight) else 0


class _Kinds:
    """Names for layers that declare the same; those of unlike layers differ."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, ...], str] = {}

    def name(self, weights: Sequence[Declared], states: Sequence[StateSpec]) -> str:
        key = (tuple(states), *map(_shape, weights))
        if key not in self._names:
            said = " and ".join(dict.fromkeys(map(_state_name, states)))
            said += ", experts" if any(isinstance(item, StackedWeight) for item in weights) else ", dense"
            same = sum(re.sub(r" \(\d+\)$", "", name) == said for name in self._names.values())
            self._names[key] = f"{said} ({same + 1})" if same else said
        return self._names[key]


def _shape(item: Declared) -> tuple[object, ...]:
    if isinstance(item, LinearWeight):
        parts = tuple((part.rows, part.columns, part.format) for part in item.parts)
        return parts, item.experts
    return item.shape if isinstance(item, Weight) else ()


def _state_name(spec: StateSpec) -> str:
    return f"{spec.kind} of {spec.window}" if spec.window else f"{spec.kind} state" if spec.per == "request" else (
        "full attention" if spec.kind == "full" else spec.kind)  # fmt: skip
