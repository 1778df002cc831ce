"""Experts that are not on the device (``infer.cpu_layer_num``, ``infer.host_experts``): asks the package for it."""

from __future__ import annotations

from typing import Any

from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device
from evener.errors import ConfigError
from evener.plugins.discover import installed_catalog


def host_placement(config: ResolvedConfig, device: Device) -> Any | None:
    """The ``Placement`` of experts on the host, as a class; None if the configuration names none, or the device is the
    host. It is constructed with the configuration, the device and its resolver, and the builders of this rank's stage
    and of all stages. Then the weights and call sites of the experts that the configuration names have the placement.
    Its ``layers_needed`` says how many layers ``infer.cpu_layer_num=auto`` means, from an assembly without it.

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
