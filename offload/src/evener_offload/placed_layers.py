"""The layers whose experts are in host memory: their call sites, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from evener.config.resolve import ResolvedConfig
from evener.config.stages import has_unlike_stages
from evener.contracts.declared import CallSite, StackedWeight, Weight, WeightGroup
from evener.contracts.placement import Placement
from evener.contracts.weights import MoEWeights
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener_offload.layers import chosen_layers, layer_number


def placed_sites(config: ResolvedConfig, own: Builder, builds: Sequence[Builder]) -> list[CallSite]:
    """The ``moe_block`` of each layer of this rank's stage whose experts the configuration puts in host memory.

    Args:
        own: this rank's builder, one of ``builds``.
        builds: the builders of all stages.

    Raises:
        ConfigError: the model does not have such layers, or the keys cannot be used together.
    """
    if has_unlike_stages(config.config):
        raise ConfigError("infer.cpu_layer_num, infer.host_experts and infer.resident_experts are for a run on one "
                          "backend, and infer.stages names several; leave one of them out")  # fmt: skip
    if (groups := config.config.infer.ep_size) > 1:
        raise ConfigError(f"infer.ep_size={groups} is for experts on the devices, and infer.cpu_layer_num, "
                          "infer.host_experts and infer.resident_experts hold them in host memory; leave "
                          "infer.ep_size out, or these")  # fmt: skip
    chosen = chosen_layers(config.config.infer, [layer_number(site.path) for b in builds for site in _sites(b)])
    return [site for site in _sites(own) if layer_number(site.path) in chosen]


def place(site: CallSite, own: Builder, placement: Placement, names: Sequence[str]) -> None:
    """Give the placement to the call site, and to its weights with these names in ``MoEWeights``."""
    site.static = {**site.static, "placement": placement}
    fields = _group(site, own).fields
    for name in names:
        if (declared := fields[name]) is not None:
            declared.placement = placement


def stacks(site: CallSite) -> tuple[StackedWeight, StackedWeight]:
    """The site's stacks of gate and up projections, and of down projections."""
    return site.static["gate_up"], site.static["down"]


class Biases(NamedTuple):
    """Biases of the experts of one layer, as the device reads them; None where the family has none."""

    gate_up: Weight | None
    down: Weight | None

    def on_device(self, w: MoEWeights) -> MoEWeights:
        """``w`` with these biases."""
        gate_up, down = (None if each is None else each.value for each in self)
        return w if gate_up is down is None else w._replace(gate_up_bias=gate_up, down_bias=down)


def biases_for_device(site: CallSite, own: Builder) -> Biases:
    """Declare a second copy of the biases of ``site``, on the device. It is part of the memory plan, and is loaded."""

    def copied(name: str) -> Weight | None:
        placed = _group(site, own).fields[name]
        if not isinstance(placed, Weight):
            return None
        found = replace(placed, name=f"{placed.name} for the device", placement=None)
        own.weights.append(found)
        return found

    return Biases(copied("gate_up_bias"), copied("down_bias"))


def _group(site: CallSite, own: Builder) -> WeightGroup:
    return next(group for group in own.groups if group.fields.get("gate_up") is site.static["gate_up"])


def _sites(build: Builder) -> Iterator[CallSite]:
    return (site for site in build.sites if site.op == "moe_block")
