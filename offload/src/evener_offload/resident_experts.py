"""Experts that the device computes although it does not hold all: those of a layer that were used last are in slots on
the device, and the others wait in host memory, page-locked where the device has such.

A layer's expert ids are read on the host. Experts that are in slots are computed at once; the others are copied
meanwhile, on a stream of their own, and computed then. A step that needs more experts than there are slots goes on in
waves: half of the slots are filled while the other half is computed with. The results of the waves are exactly those of
one product with all experts: each (token, expert) pair is computed in one wave, with all pairs of its expert, and the
pairs of a token are summed up in the end, in the order of its choices.

While a layer is computed, experts are copied that the next one will probably need (``next_router``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from evener.config.resolve import ResolvedConfig
from evener.config.schema import InferConfig
from evener.contracts.device import Device
from evener.contracts.experts import Placement
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.engine.worker.assembly import Assembly
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.ops.composites import linear_static
from evener.resolution.resolver import Resolver
from evener_offload import descriptor
from evener_offload.automatic import agreed, lacking_bytes
from evener_offload.host_backend import host_memory
from evener_offload.host_share import MOST_TOKENS, HostShare
from evener_offload.layers import layer_number, ranges
from evener_offload.next_router import NextRouter, likeliest
from evener_offload.placed_layers import place, placed_sites, stacks
from evener_offload.resident_layer import ResidentLayer
from evener_offload.residents import Wave

#: Fields of ``MoEWeights`` that are in host memory.
_PLACED = ("gate_up", "down")


class ResidentExperts(Placement):
    """Keeps ``infer.resident_experts`` experts of each layer that the configuration names on the device.

    Args:
        resolver: the device's.
        own: this rank's of the stages' ``builds``.

    Attributes:
        layer: by the path of the call site.

    Raises:
        ConfigError: the model does not have such layers, or the keys cannot be used together.
    """

    def __init__(
        self, config: ResolvedConfig, device: Device, resolver: Resolver, own: Builder, builds: Sequence[Builder]
    ) -> None:
        sites, count = placed_sites(config, own, builds), config.config.infer.resident_experts
        assert isinstance(count, int), "auto is a number by now"
        self._device, self._resolver = device, resolver
        self.torch_device, self.packings = torch.device("cpu"), resolver.packings_by_layout
        self.free = host_memory().free // config.config.infer.tp_size
        self.layers = tuple(layer_number(site.path) for site in sites)
        self.layer: dict[str, ResidentLayer] = {}
        stream = _new_stream(device)
        for site in sites:
            self._refuse(site.static, count)
            place(site, own, self, _PLACED)
            resolver.packings(stacks(site))
            self.layer[site.path] = ResidentLayer(site, own, resolver, count, device, stream)
        #: What the host computes of the missing ones; None: nothing.
        self.share: HostShare | None = None
        if (most_rows := HostShare.asked(_option(config, "host_when_sooner"))) != 0:
            self.share = HostShare(config, device, resolver, most_rows)
            for layer in self.layer.values():
                self.share.check(layer)
        shown = f"{count} experts of each of {len(sites)} layers are on the device, the others in host memory"
        resolver.manifest.notes.append(f"{shown}: {ranges(self.layers)}")
        #: By path: the router of the next layer with experts, and what that layer has, if some are in host memory.
        self._next: dict[str, tuple[NextRouter, ResidentLayer]] = {}
        if stream is not None and _option(config, "prefetch_experts"):
            every = [site for site in own.sites if site.op == "moe_block"]
            self._next = {
                site.path: (NextRouter(following, own), self.layer[following.path])
                for site, following in pairwise(every) if following.path in self.layer
            }  # fmt: skip

    def __str__(self) -> str:
        return "host memory"

    def counters(self) -> Mapping[str, int]:
        """Over all layers: experts that were needed and on the device, or were not and were copied, or were
        computed by the host; bytes that were copied; experts
        that were guessed for a next layer, and that it needed; bytes that were copied for wrong guesses."""
        layers = [(layer.residents, layer.nbytes) for layer in self.layer.values()]
        return {
            "expert_hits": sum(held.hits for held, _ in layers),
            "expert_misses": sum(held.misses for held, _ in layers),
            "expert_copied_bytes": sum(held.copied * nbytes for held, nbytes in layers),
            "expert_host_computed": 0 if self.share is None else self.share.computed,
            "expert_guesses": sum(held.guesses for held, _ in layers),
            "expert_guess_hits": sum(held.right for held, _ in layers),
            "expert_wasted_bytes": sum(held.wasted * nbytes for held, nbytes in layers),
        }

    @staticmethod
    def settled(a: Assembly) -> tuple[InferConfig, str]:
        """What ``infer.resident_experts=auto`` means for ``a``, which has all experts on the device: as many of each
        layer as fit beside the rest and a fair share of state, or all; at least one."""
        infer = a.config.config.infer
        if infer.cpu_layer_num == "auto":
            raise ConfigError("infer.cpu_layer_num=auto cannot be used with infer.resident_experts: set a number, or "
                              "leave it out for all layers")  # fmt: skip
        sites, lacking = placed_sites(a.config, a.build, [a.build]), lacking_bytes(a, "infer.resident_experts")
        packings = a.resolver.packings_by_layout
        each = sum(packings[s.layout].nbytes(s.parts, s.dtype) for site in sites for s in stacks(site))
        whole = sum(packings[s.layout].nbytes(s.parts, s.dtype) * s.experts for site in sites for s in stacks(site))
        (count,) = agreed(a).least([max(1, (whole - lacking) // each)])
        if count >= min(site.static["experts"] for site in sites):
            return replace(infer, resident_experts=0, cpu_layer_num=0, host_experts=()), "resident_experts"
        return replace(infer, resident_experts=count), "resident_experts"

    def resolve(self, op: str, path: str, static: Static, bucket: Bucket) -> OpFunction:
        layer, top, experts, device = self.layer[path], static["top"], static["experts"], self._device
        following = self._next.get(path)
        guess = following and following[0].resolve(self._resolver, bucket)
        share, on_host = self.share, None
        if share is not None and bucket.high <= MOST_TOKENS:
            on_host = share.resolve(layer, path, static, bucket)

        def use(part: str, sizes: dict[str, int], **inner: Any) -> OpFunction:
            return self._resolver.resolve(part, path, inner, bucket, sizes)

        gate_up = use("grouped_linear", {"K": top}, **linear_static(layer.gate_up.weight))
        act = use("act_and_mul", {"T": top}, inner=static["inner"],
                  **{k: static[k] for k in ("activation", "alpha", "limit", "dtype")})  # fmt: skip
        down = use("grouped_linear", {"T": top}, **linear_static(layer.down.weight))
        mix = use("mix_experts", {"K": top}, hidden=static["hidden"], dtype=static["dtype"])

        def rows(x: torch.Tensor, slots: torch.Tensor, biases: Sequence[torch.Tensor | None]) -> torch.Tensor:
            h = act(gate_up(x, layer.gate_up.value, slots, biases[0]).flatten(0, 1))
            found: torch.Tensor = down(h, layer.down.value, slots.reshape(-1, 1), biases[1])
            return found

        def start(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights
        ) -> Callable[[], torch.Tensor]:
            chosen = device.readback(ids)
            guessed = device.readback(guess(x)) if guess is not None else None
            copied = device.readback(x) if on_host is not None else None

            def finish() -> torch.Tensor:
                numbers, total, others = chosen.wait().numpy(), None, list[int]()
                if share is not None and on_host is not None and copied is not None:
                    others = share.choose(layer, numbers, on_host, copied.wait(), w)
                needed = numbers.flatten().tolist()
                for wave in layer.filled(needed, others):
                    # -1: the expert is not in the wave.
                    slot_of = np.full(experts, -1, dtype=np.int32)
                    slot_of[list(wave.slots)] = list(wave.slots.values())
                    one = rows(x, device.upload(slot_of[numbers]), _biases(device, wave, layer.residents.count, w))
                    total = one if total is None else total.add_(one)  # a pair's row is 0 in all waves but one
                if following is not None and guessed is not None:
                    following[1].ahead(likeliest(guessed.wait().numpy(), following[1].experts))
                if share is not None and on_host is not None and copied is not None and others:
                    share.learn(layer, others[-1], needed)
                    one = share.rows(others, numbers, on_host, copied.wait(), w)
                    total = one if total is None else total.add_(one)
                assert total is not None, "a step has tokens"
                return mix(total.view(*numbers.shape, -1), weights)  # type: ignore[no-any-return]

            return finish

        return start

    def _refuse(self, static: Static, count: int) -> None:
        if count >= static["experts"]:
            raise ConfigError(f"infer.resident_experts={count}: a layer has {static['experts']} experts, so all fit; "
                              "leave it out")  # fmt: skip
        if static["router_weight_on_input"]:
            raise ConfigError("infer.resident_experts is not implemented for models that weight the experts' inputs; "
                              "use infer.cpu_layer_num alone, so that the host computes")  # fmt: skip


def _biases(device: Device, wave: Wave, count: int, w: MoEWeights) -> list[torch.Tensor | None]:
    """The biases of the wave's experts, by slot; those of other slots are not read."""
    biases = w.gate_up_bias, w.down_bias
    if biases == (None, None):
        return [None, None]
    expert_of = np.zeros(count, dtype=np.int32)
    expert_of[list(wave.slots.values())] = list(wave.slots)
    index = device.upload(expert_of)
    return [None if bias is None else bias.index_select(0, index) for bias in biases]


def _option(config: ResolvedConfig, name: str) -> Any:
    return config.config.options.get("offload", {}).get(name, descriptor.options[name].default)


def _new_stream(device: Device) -> Any:
    try:
        return device.new_stream()
    except NotImplementedError:
        return None
