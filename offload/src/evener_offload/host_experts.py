"""Experts on the host. Of a step, each layer's normed rows, expert ids and weights are copied to the host; its result
is copied back. Meanwhile the device computes the layer's shared experts.

The weights are packed by the host's backend and never pass the device. With tensor parallelism each rank computes its
own part of each expert on its own threads, and the results are added up as for experts on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from evener.config.resolve import ResolvedConfig
from evener.config.schema import InferConfig
from evener.contracts.device import Device
from evener.contracts.experts import Placement
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.memory import memory_demand
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.automatic import agreed, lacking_bytes
from evener_offload.host_backend import open_host
from evener_offload.layers import layer_number, ranges
from evener_offload.placed_layers import place, placed_sites, stacks

#: What numpy calls the numbers that it does not know.
_AS_INTEGERS = {torch.bfloat16: torch.int16}
#: Fields of ``MoEWeights`` that only ``routed_experts`` reads.
_PLACED = ("gate_up", "down", "gate_up_bias", "down_bias", "slots", "copies")


class HostExperts(Placement):
    """Moves the experts that the configuration names to the host.

    Args:
        device: the device that computes everything else.
        resolver: the device's.
        own: this rank's of the stages' ``builds``.

    Raises:
        ConfigError: the model does not have such layers, or the keys cannot be used together.
    """

    def __init__(
        self, config: ResolvedConfig, device: Device, resolver: Resolver, own: Builder, builds: Sequence[Builder]
    ) -> None:
        sites = placed_sites(config, own, builds)
        self._device = device
        host, self._resolver = open_host(config, resolver)
        self.name, self.torch_device = host.name, host.torch_device
        self.packings, self.free = self._resolver.packings_by_layout, host.memory().free // config.config.infer.tp_size
        self.layers = tuple(layer_number(site.path) for site in sites)
        for site in sites:
            place(site, own, self, _PLACED)
            self._resolver.packings(stacks(site))
        resolver.manifest.notes.append(f"{self} computes the experts of {len(sites)} layers: {ranges(self.layers)}")

    def __str__(self) -> str:
        return f"the host ({self.name})"

    @staticmethod
    def settled(a: Assembly) -> tuple[InferConfig, str]:
        """What ``infer.cpu_layer_num=auto`` means for ``a``, which has all experts on the device: those of so many
        layers have to leave it that the rest and a fair share of state fit; all layers if that is not enough."""
        demand, lacking = memory_demand(a, a.config), lacking_bytes(a, "infer.cpu_layer_num")
        count = demand.layers_to_move(lacking)
        (most,) = agreed(a).most([len(demand.experts) if count is None else count])
        return replace(a.config.config.infer, cpu_layer_num=most), "cpu_layer_num"

    def resolve(self, op: str, path: str, static: Static, bucket: Bucket) -> OpFunction:
        compute = self._resolver.resolve(op, f"{path} on the host", {**static, "placement": None}, bucket)
        device = self._device

        def start(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights
        ) -> Callable[[], torch.Tensor]:
            copies = [device.readback(tensor) for tensor in (x, ids, weights)]

            def finish() -> torch.Tensor:
                rows = compute(*(copy.wait() for copy in copies), experts)
                return _upload(device, rows)

            return finish

        return start


def _upload(device: Device, rows: torch.Tensor) -> torch.Tensor:
    integers = _AS_INTEGERS.get(rows.dtype)
    if integers is None:
        return device.upload(rows.numpy())
    return device.upload(rows.view(integers).numpy()).view(rows.dtype)
