"""Experts that are not on the device (``infer.cpu_layer_num``, ``infer.host_experts``): asks the package for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device
from evener.contracts.experts import Placement
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.plugins.discover import installed_catalog
from evener.resolution.resolver import Resolver


def host_placement(config: ResolvedConfig, device: Device) -> Any | None:
    """The class that places experts on the host; None if the configuration places none, or the device is the host.

    Raises:
        ConfigError: no installed package has it.
    """
    infer = config.config.infer
    if not (infer.cpu_layer_num or infer.host_experts) or device.capabilities.host_memory:
        return None
    found = installed_catalog().lazy_imports("placement of experts")
    if "host" not in found:
        key = "cpu_layer_num" if infer.cpu_layer_num else "host_experts"
        raise ConfigError(f"infer.{key} needs a package that is not installed; type: pip install evener-offload")
    return found["host"].load()


def place_experts(
    placement: Any | None, config: ResolvedConfig, device: Device, resolver: Resolver, own: Builder,
    builds: Sequence[Builder],
) -> Placement | None:  # fmt: skip
    """Move the experts that the configuration names: their declared weights, and the ``moe_block`` of their layers, get
    the placement. ``own`` is this rank's of the stages' ``builds``. With ``infer.cpu_layer_num=auto`` none: their number follows from the whole assembly."""
    if placement is None or config.config.infer.cpu_layer_num == "auto":
        return None
    made: Placement = placement(config, device, resolver, own, builds)
    return made
