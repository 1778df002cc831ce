"""The host's backend beside the device's: its device, and a resolver over its kernels; and what goes between them."""

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

#: The backend that computes on the host.
HOST = "cpu"


def host_memory() -> MemoryInfo:
    """The host's memory, free and in all.

    Raises:
        PluginError: its backend is not installed.
    """
    return BackendSearch(HOST).load({}).open_device().memory()


def option(config: ResolvedConfig, name: str) -> Any:
    """The value of ``offload.NAME``."""
    return config.config.options.get("offload", {}).get(name, descriptor.options[name].default)


def auto_or_number(name: str, value: str, most: int, what: str) -> int | None:
    """What ``offload.NAME`` says if it is off, auto or a number: 0, None, or the number, from 1 to ``most``.

    Raises:
        ConfigError: it is something else; ``what`` says which numbers it may be.
    """
    if value in ("auto", "off"):
        return None if value == "auto" else 0
    if not (value.isascii() and value.isdecimal()) or not 0 < int(value) <= most:
        raise ConfigError(f"offload.{name}={value!r}: set auto, off, or {what}")
    return int(value)


def new_stream(device: Device) -> Any:
    """A stream of the device for copies; None if it has one queue."""
    try:
        return device.new_stream()
    except NotImplementedError:
        return None


def open_host(config: ResolvedConfig, beside: Resolver) -> tuple[Device, Resolver]:
    """Open the host's device, and make a resolver over its kernels. What it decides stands in the manifest of the
    resolver ``beside`` it, the device's, and errors of its kernels are attributed there.

    Raises:
        ConfigError: the host does not compute in the run's dtype.
        PluginError: the backend is not installed, or cannot run here.
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
    # An option about a kernel of the device's packages is not about the host.
    forced = {op: provider for op, provider in beside.available.forced.items() if provider == REFERENCE}
    resolver = Resolver(replace(beside.available, kernels=loaded.kernels(device), states=(), device=can, forced=forced,
                                tuned=TuningTable()))  # fmt: skip
    resolver.manifest, resolver.attribution = beside.manifest, beside.attribution
    return device, resolver


def upload(device: Device, rows: torch.Tensor) -> torch.Tensor:
    """Copy rows that the host has computed to the device."""
    import torch

    if rows.dtype is torch.bfloat16:  # which numpy does not know
        return device.upload(rows.view(torch.int16).numpy()).view(rows.dtype)
    return device.upload(rows.numpy())
