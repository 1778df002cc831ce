"""The host's backend beside the device's backend: its device, a resolver over its kernels, and copies between both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evener.backend_search import BackendSearch
from evener.config.resolve import ResolvedConfig
from evener.contracts.device import Device, MemoryInfo
from evener.errors import ConfigError
from evener.resolution.manifest import REFERENCE
from evener.resolution.resolver import Resolver
from evener.tuning_files.measurements import TuningTable
from evener_offload import descriptor
from evener_offload.numa import spread_memory

if TYPE_CHECKING:
    import torch

#: Name of the backend that computes on the host.
HOST = "cpu"


def host_memory() -> MemoryInfo:
    """The host's memory, free and total.

    Raises:
        PluginError: the host's backend is not installed.
    """
    return BackendSearch(HOST).load({}).open_device().memory()


def option(config: ResolvedConfig, name: str) -> Any:
    """The value of ``offload.NAME``."""
    return config.config.options.get("offload", {}).get(name, descriptor.options[name].default)


def auto_or_number(name: str, value: str, most: int, what: str) -> int | None:
    """Parse the value of ``offload.NAME``: 0 for off, None for auto, or the number, from 1 to ``most``.

    Args:
        what: describes the allowed numbers, for the error.

    Raises:
        ConfigError: the value is something else.
    """
    if value in ("auto", "off"):
        return None if value == "auto" else 0
    if not (value.isascii() and value.isdecimal()) or not 0 < int(value) <= most:
        raise ConfigError(f"offload.{name}={value!r}: set auto, off, or {what}")
    return int(value)


def new_stream(device: Device) -> Any:
    """A stream of the device for copies; None if the device has only one queue."""
    try:
        return device.new_stream()
    except NotImplementedError:
        return None


def open_host(config: ResolvedConfig, beside: Resolver) -> tuple[Device, Resolver]:
    """Open the host's device, and make a resolver over its kernels. The new resolver writes its decisions to the
    manifest of ``beside``, the device's resolver, and attributes errors of kernels there.

    Raises:
        ConfigError: the host does not compute in the run's dtype.
        PluginError: the host's backend is not installed, or cannot run here.
    """
    spread_memory(option(config, "numa"))
    loaded = BackendSearch(HOST).load({})
    device = loaded.open_device()
    can = device.capabilities
    if config.dtype not in can.dtypes | can.emulated:
        raise ConfigError(f"dtype={config.dtype} is not supported on {device.name}, which should compute experts "
                          f"(infer.cpu_layer_num); it has {', '.join(sorted(can.dtypes | can.emulated))}")  # fmt: skip
    device.limit_threads(config.threads)
    device.select()
    # A forced kernel of the device's packages does not exist on the host; the reference does.
    forced = {op: provider for op, provider in beside.available.forced.items() if provider == REFERENCE}
    resolver = Resolver(replace(beside.available, kernels=loaded.kernels(device), states=(), device=can, forced=forced,
                                tuned=TuningTable()))  # fmt: skip
    resolver.manifest, resolver.attribution = beside.manifest, beside.attribution
    return device, resolver


def upload(device: Device, rows: torch.Tensor) -> torch.Tensor:
    """Copy ``rows``, which the host has computed, to the device."""
    import torch

    if rows.dtype is torch.bfloat16:  # numpy does not know it
        return device.upload(rows.view(torch.int16).numpy()).view(rows.dtype)
    return device.upload(rows.numpy())
