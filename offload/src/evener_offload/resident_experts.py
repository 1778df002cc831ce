"""Layers with slots: the device computes their experts, but holds only those that were used last, in slots. The other
experts are in host memory, page-locked if the device has such memory.

A layer's expert ids are read on the host. Experts in slots are computed at once. Missing experts are copied meanwhile,
on a stream of their own, and then computed. A step that needs more experts than there are slots goes on in waves: half
of the slots are filled while the device computes with the other half (``slot_products``).

While a layer is computed, the experts are copied that the next layer will probably need (``next_router``). After some
steps in which the next layer missed no expert, nothing is guessed for it until it misses one again.

If the host may compute experts (``offload.host_when_sooner``), decode steps are captured. In them the host computes all
experts without a slot (``captured_residents``), except those that pass through other slots (``captured_passing``).
Single prompts are captured, except for experts (``captured_prompts``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from evener.config.resolve import ResolvedConfig
from evener.config.schema import InferConfig
from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.placement import Placement
from evener.contracts.weights import MoEWeights
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.runner import ForwardStep, Runner
from evener.errors import ConfigError, EngineError
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.automatic import agreed, lacking_bytes
from evener_offload.captured_experts import CapturedExperts, HostWork, follows_drafter, why_eager
from evener_offload.captured_passing import NONE_PASS, CapturedPassing
from evener_offload.captured_prompts import CapturedPrompts, captured_prompts
from evener_offload.captured_residents import CapturedResidents
from evener_offload.host_backend import host_memory, new_stream, option
from evener_offload.host_share import HostShare
from evener_offload.layers import layer_number, ranges
from evener_offload.next_router import NextRouter, likeliest
from evener_offload.numa import spread_memory
from evener_offload.passing_part import parse_passing
from evener_offload.passing_slots import PassingSlots
from evener_offload.placed_layers import place, placed_sites, stacks
from evener_offload.resident_layer import ResidentLayer
from evener_offload.slot_products import MOST_TOKENS, SlotProducts

#: Fields of ``MoEWeights`` that are in host memory.
_PLACED = ("gate_up", "down")
#: After so many steps in which a layer missed no expert, guesses for it stop.
_QUIET = 16


class ResidentExperts(Placement):
    """Keeps ``infer.resident_experts`` experts of each layer that the configuration names on the device.

    Args:
        resolver: the device's.
        own: this rank's builder, one of ``builds``.
        builds: the builders of all stages.

    Attributes:
        layer: by the path of the call site.
        second_bytes: bytes of experts that are in host memory a second time, as the host reads them.

    Raises:
        ConfigError: the model does not have such layers, or the keys cannot be used together.
    """

    def __init__(
        self, config: ResolvedConfig, device: Device, resolver: Resolver, own: Builder, builds: Sequence[Builder]
    ) -> None:
        sites, count = placed_sites(config, own, builds), config.config.infer.resident_experts
        assert isinstance(count, int), "auto is a number by now"
        self._device, self._resolver = device, resolver
        spread_memory(option(config, "numa"))
        self.torch_device, self.packings = torch.device("cpu"), resolver.packings_by_layout
        self.free = host_memory().free // config.config.infer.tp_size
        self.layers = tuple(layer_number(site.path) for site in sites)
        self.layer: dict[str, ResidentLayer] = {}
        self.second_bytes = 0
        stream = new_stream(device)
        #: Computes missing experts on the host; None: the host computes none.
        self.share: HostShare | None = None
        if (most_rows := HostShare.parse_threshold(option(config, "host_when_sooner"))) != 0:
            self.share = HostShare(config, device, resolver, most_rows)
            self.packings = {**self.share.packings, **self.packings}
        for site in sites:
            self._refuse(site.static, count)
            place(site, own, self, _PLACED)
            if self.share is not None:
                self.second_bytes += self.share.keep(site, own, self)
            else:
                resolver.packings(stacks(site))
            self.layer[site.path] = ResidentLayer(
                [stacks(site)], site.static["experts"], own, resolver.packings_by_layout, count, device, stream
            )
        #: Submits captured steps; None: steps run eagerly.
        self.captured: CapturedResidents | None = None
        #: Captures of single prompts of more than ``MOST_TOKENS`` tokens; None: they run eagerly.
        self._prompts: CapturedPrompts | None = None
        self._eager = True
        #: Lets a part of the experts without slots pass through the device in captured steps; None: the host computes
        #: all of them.
        self._passing: CapturedPassing | None = None
        self.eager = self._captures(config, own, sites)
        shown = f"{count} experts of each of {len(sites)} layers are on the device, the others in host memory"
        resolver.manifest.notes.append(f"{shown}: {ranges(self.layers)}")
        resolver.manifest.notes += [] if self._prompts is None else [str(self._prompts)]
        #: By path: the router and the slots of the next layer with experts, if that layer has slots.
        self._next: dict[str, tuple[NextRouter, ResidentLayer]] = {}
        if stream is not None and option(config, "prefetch_experts"):
            every = [site for site in own.sites if site.op == "moe_block"]
            self._next = {
                site.path: (NextRouter(following, own), self.layer[following.path])
                for site, following in pairwise(every) if following.path in self.layer
            }  # fmt: skip

    def _captures(self, config: ResolvedConfig, own: Builder, sites: Sequence[CallSite]) -> str | None:
        """Prepare captured steps. Returns why there are none, in the form of ``Placement.eager``; None if there are."""
        share, captured, why = self.share, None, None if self.share else ", and offload.host_when_sooner=off"
        if share is not None and (why := why_eager(config, self._device, follows_drafter(config))) is None:
            captured = CapturedExperts(
                self._device, share.host, config.threads, self._resolver.attribution, next(iter(self.layer)), HostWork()
            )
        self._passing = self._passing_part(config, own, sites, captured)
        if captured is None:
            return why
        most = (lambda path: 0) if self._passing is None else self._passing.most
        self.captured = CapturedResidents(self._device, self.layer, captured, most)
        self.replayed, self.eager_forward = self.captured.replayed, self._run_eagerly
        self._eager = False
        self._prompts = captured_prompts(config, self._device)
        return None

    def _passing_part(
        self, config: ResolvedConfig, own: Builder, sites: Sequence[CallSite], captured: CapturedExperts | None
    ) -> CapturedPassing | None:
        percent, least, _ = parse_passing(config)
        if percent == 0:
            return None
        stream, why = new_stream(self._device), None
        if captured is None or self.share is None or not config.use_cuda_graph:
            why = "steps are not captured"
        elif percent is None and stream is None:
            why = "copies do not run beside other work"
        if captured is None or self.share is None or why is not None:
            self._resolver.manifest.notes.append(f"{NONE_PASS}: {why}")
            return None
        residents = config.config.infer.resident_experts
        assert isinstance(residents, int), "auto is a number by now"
        passing = CapturedPassing(
            sites=sites, found={site.path: stacks(site) for site in sites}, biases={}, own=own, resolver=self._resolver,
            device=self._device, stream=stream, captured=captured, host=self.share.host, threads=config.threads,
            percent=percent, least=least, most=min(config.max_reqs, MOST_TOKENS), running=lambda: not self._eager,
            residents=residents,
        )  # fmt: skip
        self._resolver.manifest.notes.append(str(passing))
        return passing

    def _run_eagerly(self, runner: Runner, plan: Plan, step: ForwardStep) -> torch.Tensor:
        """``Placement.eager_forward``, with all rows at once. Single prompts run from their captures, unless they are
        so small that the host computes missing experts."""
        assert self.captured is not None, "it is set where this is"
        self.captured.before_eager_step()
        self._eager, hidden = True, None
        try:
            if self._prompts is not None and sum(plan.counts) > MOST_TOKENS:
                hidden = self._prompts.run(runner, plan)
            return runner.model.forward(step) if hidden is None else hidden
        finally:
            self._eager = False

    def __str__(self) -> str:
        return "host memory"

    def counters(self) -> Mapping[str, int]:
        """Counts since the start, summed over all layers. In eager steps:

        - needed experts that were on the device, that were copied, and that the host computed
        - bytes of experts that were copied
        - experts that were guessed for a next layer, those of them that it needed, and bytes copied for wrong guesses

        For captured steps see ``CapturedResidents.counters``. And captured prompts.

        Raises:
            EvenerError: the host failed in a captured step.
        """
        layers = [(layer.residents, layer.nbytes) for layer in self.layer.values()]
        return {
            "expert_hits": sum(held.hits for held, _ in layers),
            "expert_misses": sum(held.misses for held, _ in layers),
            "expert_copied_bytes": sum(held.copied * nbytes for held, nbytes in layers),
            "expert_host_computed": 0 if self.share is None else self.share.computed,
            "expert_guesses": sum(held.guesses for held, _ in layers),
            "expert_guess_hits": sum(held.right for held, _ in layers),
            "expert_wasted_bytes": sum(held.wasted * nbytes for held, nbytes in layers),
            **({} if self.captured is None else self.captured.counters()),
            **({} if self._prompts is None else {"host_expert_captured_prompts": self._prompts.steps}),
        }

    def close(self) -> None:
        if self._prompts is not None:
            self._prompts.close()
        if self.share is not None:
            self.share.close()

    @staticmethod
    def settled(a: Assembly) -> tuple[InferConfig, str]:
        """The configuration with the number that ``infer.resident_experts=auto`` means, and the name of the key. ``a``
        has all experts on the device. The number: as many experts of each layer as fit beside the rest and a fair share
        of state, at least 1; 0 if all experts fit.

        Raises:
            ConfigError: ``infer.cpu_layer_num`` is auto too, or there are several pipeline stages.
        """
        infer = a.config.config.infer
        if infer.cpu_layer_num == "auto":
            raise ConfigError("infer.cpu_layer_num=auto cannot be used with infer.resident_experts: set a number, or "
                              "leave it out for all layers")  # fmt: skip
        sites, lacking = placed_sites(a.config, a.build, [a.build]), lacking_bytes(a, "infer.resident_experts")
        packings, percent = a.resolver.packings_by_layout, parse_passing(a.config).percent
        captures = a.config.use_cuda_graph and why_eager(a.config, a.device, follows_drafter(a.config)) is None
        if lacking > 0 and percent != 0 and captures and option(a.config, "host_when_sooner") != "off":
            lacking += PassingSlots.room(sites, packings, percent, a.device.capabilities.alignment)
        each = sum(packings[s.layout].nbytes(s.parts, s.dtype) for site in sites for s in stacks(site))
        whole = sum(packings[s.layout].nbytes(s.parts, s.dtype) * s.experts for site in sites for s in stacks(site))
        (count,) = agreed(a).least([max(1, (whole - lacking) // each)])
        if count >= min(site.static["experts"] for site in sites):
            return replace(infer, resident_experts=0, cpu_layer_num=0, host_experts=()), "resident_experts"
        return replace(infer, resident_experts=count), "resident_experts"

    def resolve(self, op: str, path: str, static: Static, bucket: Bucket) -> OpFunction:
        layer, device, following = self.layer[path], self._device, self._next.get(path)
        guess = following and following[0].resolve(self._resolver, bucket)
        products = SlotProducts(layer, 0, device, self._resolver, path, static, bucket, False)
        share, on_host, captured, routed, prompts = self.share, None, self.captured, None, self._prompts
        passing = None
        if share is not None and bucket.high <= MOST_TOKENS:
            on_host = share.resolve(path, static, bucket)
        if share is not None and captured is not None and bucket.high <= MOST_TOKENS:
            routed = share.routed(path, static, bucket, "captured steps")
            if self._passing is not None:
                beside = partial(share.routed, path, static, bucket, "captured steps in which experts pass")
                passing = self._passing.resolve(path, static, bucket, beside, share.expert_bytes(path))

        def start(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights) -> Any:
            if prompts is not None and prompts.recording:
                return prompts.start(eagerly, x, ids, weights, w)
            if self._eager:
                return eagerly(x, ids, weights, w)
            if captured is None or share is None or routed is None:
                raise EngineError(f"experts in slots are captured in steps of up to {MOST_TOKENS} rows")
            host_weights, nbytes = partial(share.weights, path, w), share.expert_bytes(path)
            return captured.start(path, products, routed, nbytes, x, ids, weights, w, host_weights, passing)

        def eagerly(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights) -> Any:
            chosen, guessed = device.readback(ids), None
            if guess is not None and following is not None and following[1].quiet < _QUIET:
                guessed = device.readback(guess(x))
            copied = None if on_host is None else (device.readback(x), device.readback(weights))

            def finish() -> torch.Tensor:
                numbers, others, beside = chosen.wait().numpy(), list[int](), None
                if share is not None and on_host is not None and copied is not None:
                    rows, factors = copied[0].wait(), copied[1].wait()
                    others = share.choose(layer, path, numbers, on_host, rows, w)
                    if others:
                        beside = share.start(others, numbers, on_host, rows, factors, w)
                y = products(x, ids, weights, w, numbers, others)
                if following is not None and guessed is not None:
                    following[1].ahead(likeliest(guessed.wait().numpy(), following[1].experts))
                if share is not None and beside is not None:
                    share.learn(layer, others[-1], numbers.ravel().tolist())
                    y = y + beside()
                return y

            return finish

        return start

    def _refuse(self, static: Static, count: int) -> None:
        if count >= static["experts"]:
            raise ConfigError(f"infer.resident_experts={count}: a layer has {static['experts']} experts, so all fit; "
                              "leave it out")  # fmt: skip
        if static["router_weight_on_input"]:
            raise ConfigError("infer.resident_experts is not implemented for models that weight the experts' inputs; "
                              "use infer.cpu_layer_num alone, so that the host computes")  # fmt: skip
