"""The layers whose experts are placed: their call sites, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evener.config.resolve import ResolvedConfig
from evener.config.stages import has_unlike_stages
from evener.contracts.declared import CallSite, StackedWeight, WeightGroup
from evener.contracts.placement import Placement
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener_offload.layers import chosen_layers, layer_number


def placed_sites(config: ResolvedConfig, own: Builder, builds: Sequence[Builder]) -> list[CallSite]:
    """The ``moe_block`` of each layer of this rank's stage whose experts the configuration places.

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
    """Give the call site the placement, and the weights with these names of ``MoEWeights``."""
    site.static = {**site.static, "placement": placement}
    fields = _group(site, own).fields
    for name in names:
        if (declared := fields[name]) is not None:
            declared.placement = placement


def stacks(site: CallSite) -> tuple[StackedWeight, StackedWeight]:
    """Its stacks of gate and up, and of down projections."""
    return site.static["gate_up"], site.static["down"]


def _group(site: CallSite, own: Builder) -> WeightGroup:
    return next(group for group in own.groups if group.fields.get("gate_up") is site.static["gate_up"])


def _sites(build: Builder) -> Iterator[CallSite]:
    return (site for site in build.sites if site.op == "moe_block")
