"""Host layers: layers whose experts the host computes.

In each eager step, a layer's normed rows, expert ids and weights are copied to the host, and the result is copied back.
Meanwhile the device computes the layer's shared experts, and the other half of the rows if the step is computed in two
halves (``halves``). In captured decode steps the device calls the host (``captured_experts``). Single prompts are
captured, except for these experts (``captured_prompts``).

The host's backend packs the weights. In steps of many tokens the experts pass through slots on the device if that is
faster (``streamed_layers``). In captured steps of many requests a part of them may pass (``captured_passing``). With
tensor parallelism each rank computes its own part of each expert on its own threads; the results are summed as for
experts on the device.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from evener.config.resolve import ResolvedConfig
from evener.config.schema import InferConfig
from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.placement import Placement
from evener.contracts.weights import MoEWeights
from evener.distributed.agreement import Agreement
from evener.engine.inputs.step_layout import StepLayout
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.memory import memory_demand
from evener.engine.worker.runner import ForwardStep, Runner
from evener.layers.builder import Builder
from evener.resolution.resolver import Resolver
from evener_offload.automatic import agreed, lacking_bytes
from evener_offload.captured_experts import SPARING, CapturedExperts, HostWork, follows_drafter, why_eager
from evener_offload.captured_passing import NONE_PASS, CapturedPassing
from evener_offload.captured_prompts import captured_prompts
from evener_offload.device_packing import PackedByDevice
from evener_offload.half_plans import half_plans
from evener_offload.halves import Halves
from evener_offload.halving import Halving
from evener_offload.host_backend import new_stream, open_host, option, upload
from evener_offload.layers import layer_number, ranges
from evener_offload.passing_part import parse_passing
from evener_offload.passing_slots import PassingSlots
from evener_offload.placed_layers import biases_for_device, place, placed_sites, stacks
from evener_offload.prompt_share import PromptShare
from evener_offload.second_layout import keep, second_bytes, second_layout
from evener_offload.streamed_layers import StreamedLayers, parse_threshold

#: Fields of ``MoEWeights`` that only ``routed_experts`` reads.
_PLACED = ("gate_up", "down", "gate_up_bias", "down_bias", "slots", "copies")


class HostExperts(Placement):
    """Places the experts that the configuration names on the host.

    Args:
        device: the device that computes everything else.
        resolver: the device's.
        own: this rank's builder, one of ``builds``.
        builds: the builders of all stages.

    Raises:
        ConfigError: the model does not have such layers, or the keys cannot be used together.
    """

    def __init__(
        self, config: ResolvedConfig, device: Device, resolver: Resolver, own: Builder, builds: Sequence[Builder]
    ) -> None:
        sites = placed_sites(config, own, builds)
        self._device = device
        host, self._resolver = open_host(config, resolver)
        self._host, self._threads = host, config.threads
        self.name, self.torch_device = host.name, host.torch_device
        self.packings, self.free = self._resolver.packings_by_layout, host.memory().free // config.config.infer.tp_size
        self.layers = tuple(layer_number(site.path) for site in sites)
        self._work, self._expert_bytes = HostWork(), dict[str, int]()
        for site in sites:
            place(site, own, self, _PLACED)
        least, stream = parse_threshold(str(option(config, "stream_prompts"))), new_stream(device)
        inputs = any(site.static["router_weight_on_input"] for site in sites)
        auto = least is None and StreamedLayers.worthwhile(sites, self._resolver, resolver, stream, self.free)
        streamed = sites if not inputs and (auto or least) else []

        # Threads hold ``select`` until they end, a moment after the engine is gone. A weak reference: the device, with
        # all captures, must not stay alive so long.
        there = weakref.ref(device)

        def select() -> None:
            if (found := there()) is not None:
                found.select()
            host.select()

        self._share = None
        if streamed and least is None:
            self._share = PromptShare(device, host, self._threads, select, self._work)
        self.streamed = StreamedLayers(
            sites=streamed, own=own, host=self._resolver, resolver=resolver, device=device, placement=self, least=least,
            stream=stream, share=self._share,
        )  # fmt: skip
        theirs = resolver.packings_by_layout.items()
        self.packings = {**{name: PackedByDevice(each, device) for name, each in theirs}, **self.packings}
        for site in sites:
            self._resolver.packings(stacks(site))
            each = (self.packings[s.layout].nbytes(s.parts, s.dtype) for s in stacks(site))
            self._expert_bytes[site.path] = sum(each)

        self._halves = Halves(select)
        mode = str(option(config, "halves"))
        self._halving = Halving(mode, Agreement(own.communicator, device.torch_device))
        drafted = follows_drafter(config)
        when = "never, because a drafter follows them" if drafted else str(self._halving)
        self.eager = why_eager(config, device, drafted) or (", and offload.halves=on" if mode == "on" else None)
        first = sites[0].path if sites else ""
        self._captured = CapturedExperts(device, host, self._threads, self._resolver.attribution, first, self._work)
        #: Lets a part of the experts pass through the device in captured steps; None: the host computes all.
        self._passing = self._passing_part(config, own, resolver, sites, stream, inputs)
        self.replayed = _replayed(self._captured, self._passing)
        #: By path and how many of the layer's experts pass: the layer's weights, and the same for the host.
        self._rest: dict[tuple[str, int], tuple[MoEWeights, MoEWeights]] = {}
        #: Captures of streamed single prompts; None: such prompts run eagerly.
        self._prompts = captured_prompts(config, device) if streamed and self.eager is None else None
        resolver.manifest.notes += [] if self._prompts is None else [str(self._prompts)]
        #: Whether the step being submitted is eager.
        self._eager = False
        resolver.manifest.notes.append(f"{self} computes the experts of {len(sites)} layers: {ranges(self.layers)}; "
                                       f"steps are halved: {when}")  # fmt: skip

    def _passing_part(
        self, config: ResolvedConfig, own: Builder, resolver: Resolver, sites: Sequence[CallSite], stream: Any,
        inputs: bool,
    ) -> CapturedPassing | None:  # fmt: skip
        percent, least, chosen = parse_passing(config)
        if percent == 0 or not sites:
            return None
        why = None
        if self.eager is not None or not config.use_cuda_graph:
            why = "steps are not captured"
        elif inputs:
            why = "the model weights the experts' inputs"
        elif percent is None and not StreamedLayers.worthwhile(sites, self._resolver, resolver, stream, self.free):
            why = "copies do not run beside other work, or host memory does not hold experts as the device reads them"
        if why is not None:
            resolver.manifest.notes.append(f"{NONE_PASS}: {why}")
            return None
        found, biases = dict(self.streamed.stacks), dict(self.streamed.biases)
        for site in sites if not found else ():
            found[site.path] = second_layout(site, self._resolver, resolver, "the device")
            keep(site, found[site.path], own, self)
            self.streamed.second_bytes += second_bytes(site, found[site.path], resolver.packings_by_layout)
            biases[site.path] = biases_for_device(site, own)
        each = (site.static["experts"] * self._expert_bytes[site.path] for site in sites)
        left = self.free - sum(each) - self.streamed.second_bytes
        passing = CapturedPassing(
            sites=sites, found=found, biases=biases, own=own, resolver=resolver, device=self._device,
            stream=new_stream(self._device), captured=self._captured, host=self._host, threads=self._threads,
            percent=percent, least=least, most=config.max_reqs, running=lambda: not self._eager,
            free=left if chosen else 0,
        )  # fmt: skip
        resolver.manifest.notes.append(str(passing))
        return passing

    def __str__(self) -> str:
        return f"the host ({self.name})"

    def counters(self) -> Mapping[str, int]:
        """Counts since the start, by name:

        - bytes of experts that the host has read, each expert once in a layer's step, or once in each half of it
        - microseconds in which the host computed
        - steps that were computed in two halves
        - captured steps
        - bytes of experts that passed through the device in captured steps
        - experts that took another one's place among those that pass
        - captured prompts
        - tokens of streamed steps, counted once for each layer
        - bytes of experts that were copied in streamed steps

        Raises:
            EvenerError: the host failed in a captured step.
        """
        self._captured.check()
        return {
            "host_expert_read_bytes": self._work.read_bytes,
            "host_expert_microseconds": self._work.nanoseconds // 1000,
            "host_expert_halved_steps": self._work.halved,
            "host_expert_captured_steps": self._captured.steps,
            "host_expert_passed_bytes": self._work.passed_bytes,
            "expert_exchanges": 0 if self._passing is None else self._passing.exchanged,
            "host_expert_captured_prompts": 0 if self._prompts is None else self._prompts.steps,
            "host_expert_streamed_tokens": self.streamed.tokens,
            "host_expert_streamed_bytes": self.streamed.copied,
        }

    def close(self) -> None:
        self._halves.close()
        if self._prompts is not None:
            self._prompts.close()
        if self._share is not None:
            self._share.close()

    def eager_forward(self, runner: Runner, plan: Plan, step: ForwardStep) -> torch.Tensor:
        """Hidden states [T, hidden] of the step, computed in two halves if that is faster.

        These steps are not divided: those of a stage without host layers, streamed ones, steps with rows of media, and
        steps of which a drafter reads the layers' outputs as a whole."""
        self._eager = True
        try:
            return self._forward(runner, plan, step)
        finally:
            self._eager = False

    def _forward(self, runner: Runner, plan: Plan, step: ForwardStep) -> torch.Tensor:
        self.streamed.begin(sum(plan.counts))
        if self._prompts is not None and self.streamed.takes(sum(plan.counts)):
            captured = self._prompts.run(runner, plan)
            if captured is not None:
                return captured
        whole = not self.layers or step.embedding_overrides is not None or runner.after_step is not None
        whole = whole or self.streamed.takes(sum(plan.counts)) is not False
        if whole or (plans := half_plans(plan, runner.geometry.block_size)) is None:
            return runner.model.forward(step)
        halved, began = self._halving(step.bucket), time.perf_counter()
        hidden = self._halved(runner, plans, step) if halved else runner.model.forward(step)
        self._halving.record(step.bucket, halved, time.perf_counter() - began)
        return hidden

    def _halved(self, runner: Runner, plans: Sequence[Plan], step: ForwardStep) -> torch.Tensor:
        layouts = [StepLayout(plan, runner.tables) for plan in plans]
        halves = [runner.step(layout, layout.upload(runner.device)) for layout in layouts]
        if step.stream is not None:
            streams = zip(*(part.split([layout.tokens for layout in layouts]) for part in step.stream), strict=True)
            halves = [replace(half, stream=stream) for half, stream in zip(halves, streams, strict=True)]
        self._work.halved += 1
        # Meanwhile this thread needs a core. If the host computed on all cores, the thread that shares this core would
        # be late, and all others would wait for it in every product.
        self._host.limit_threads(self._threads - (self._threads >= SPARING))
        try:
            return torch.cat(self._halves.run(*(partial(runner.model.forward, half) for half in halves)))
        finally:
            self._host.limit_threads(self._threads)

    @staticmethod
    def settled(a: Assembly) -> tuple[InferConfig, str]:
        """The configuration with the number that ``infer.cpu_layer_num=auto`` means, and the name of the key. ``a`` has
        all experts on the device. The number: the fewest layers whose experts must leave the device so that the rest
        and a fair share of state fit; all layers if that is not enough."""
        demand, lacking = memory_demand(a, a.config), lacking_bytes(a, "infer.cpu_layer_num")
        streams = parse_threshold(str(option(a.config, "stream_prompts"))) != 0
        if lacking > 0 and streams and new_stream(a.device) is not None:
            moved = [site for site in a.build.sites if site.op == "moe_block"]
            lacking += StreamedLayers.room(moved, a.resolver.packings_by_layout)
        percent = parse_passing(a.config).percent
        if lacking > 0 and percent != 0 and a.config.use_cuda_graph and a.device.capabilities.host_calls:
            moved = [site for site in a.build.sites if site.op == "moe_block"]
            alignment = a.device.capabilities.alignment
            lacking += PassingSlots.room(moved, a.resolver.packings_by_layout, percent, alignment)
        count = demand.layers_to_move(lacking)
        (most,) = agreed(a).most([len(demand.experts) if count is None else count])
        return replace(a.config.config.infer, cpu_layer_num=most), "cpu_layer_num"

    def resolve(self, op: str, path: str, static: Static, bucket: Bucket) -> OpFunction:
        compute = self._on_host(op, f"{path} on the host", static, bucket)
        beside = compute
        if self._share is not None:  # a kernel keeps the addresses of the weights of its last call: one kernel per use
            beside = self._on_host(op, f"{path} beside copies", static, bucket)
        device, halves, work = self._device, self._halves, self._work
        nbytes, experts_of_layer, streamed = self._expert_bytes[path], static["experts"], self.streamed
        stream = streamed.resolve(path, static, bucket, beside)

        def for_passing() -> OpFunction:
            return self._on_host(op, f"{path} beside passing experts", static, bucket)

        passing = self._passing and self._passing.resolve(path, static, bucket, for_passing, nbytes)

        def start(
            x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: MoEWeights
        ) -> Callable[[], torch.Tensor]:
            if stream is not None and self._prompts is not None and self._prompts.recording:
                return self._prompts.start(stream, x, ids, weights, experts)
            if not self._eager:
                started = passing and passing((x, ids, weights), experts, partial(self._for_host, path, experts))
                if started:
                    return started
                return self._captured.start(path, compute, nbytes, x, ids, weights, experts)
            if stream is not None:
                if streamed.takes(x.shape[0]) is None:
                    streamed.measure(path, static, compute, x, experts)
                if streamed.takes(x.shape[0]):
                    return cast("Callable[[], torch.Tensor]", stream(x, ids, weights, experts))
            copies = [device.readback(tensor) for tensor in (x, ids, weights)]

            def rows() -> torch.Tensor:
                x, ids, weights = (copy.wait() for copy in copies)
                began = time.perf_counter_ns()
                found: torch.Tensor = compute(x, ids, weights, experts)
                work.nanoseconds += time.perf_counter_ns() - began
                work.read_bytes += nbytes * _distinct(ids, experts_of_layer)
                return found

            wait = halves.compute(rows) if halves.active else rows
            return lambda: upload(device, wait())

        return start

    def _for_host(self, path: str, w: MoEWeights, passing: int) -> MoEWeights:
        """See ``ForHost``."""
        known = self._rest.get((path, passing))
        if known is None or known[0] is not w:
            assert self._passing is not None, "it asks for them"
            slots, copies = self._passing.places[path].on_host(passing)
            known = self._rest[path, passing] = w, w._replace(slots=slots, copies=copies)
        return known[1]

    def _on_host(self, op: str, path: str, static: Static, bucket: Bucket) -> OpFunction:
        choices = self._resolver.manifest.choices
        known = len(choices)
        found = self._resolver.resolve(op, path, {**static, "placement": None}, bucket)
        # A capture holds only a call of the host, not the host's kernels.
        choices[known:] = [replace(choice, capturable=True) for choice in choices[known:]]
        return found


def _replayed(captured: CapturedExperts, passing: CapturedPassing | None) -> Callable[[int], None]:
    """``Placement.replayed`` without a reference to the placement: a cycle would keep device memory for a while."""

    def run(rows: int) -> None:
        captured.replayed(rows)
        if passing is not None:
            passing.replayed()

    return run


def _distinct(ids: torch.Tensor, experts: int) -> int:
    """How many different experts are in ``ids`` [T, k]."""
    return int(np.count_nonzero(np.bincount(ids.numpy().reshape(-1), minlength=experts)))
