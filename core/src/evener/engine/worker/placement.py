"""Experts that are not on the device (``infer.cpu_layer_num`` and its like): asks the package for it."""

from __future__ import annotations

from typing import Any

from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device
from evener.plugins.discover import installed_catalog


def host_placement(config: ResolvedConfig, device: Device) -> Any | None:
    """The ``Placement`` of experts in host memory, as a class; None if the configuration names none, or the device
    is the host. It is constructed with the configuration, the device and its resolver, and the builders of this rank's
    stage and of all stages. Then the weights and call sites of the experts that the configuration names have the
    placement. Its ``settled`` says what ``auto`` means, from an assembly without it: the keys, and which one it set.

    Raises:
        ConfigError: no installed package has it.
    """
    infer = config.config.infer
    key = next((k for k in ("resident_experts", "cpu_layer_num", "host_experts") if getattr(infer, k)), None)
    if key is None or device.capabilities.host_memory:
        return None
    name = "resident" if infer.resident_experts else "host"
    return installed_catalog().need("placement of experts", name, f"infer.{key}", "evener-offload")
