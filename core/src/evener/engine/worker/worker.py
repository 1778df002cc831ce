"""The worker: one device rank. It builds the model, plans the memory, loads the weights, warms up, then runs plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.config.stages import has_unlike_stages, stage_part
from evener.contracts.architecture import Architecture
from evener.contracts.connector import BlockMover
from evener.distributed.communicators import JointCapture
from evener.distributed.world import RankGroups, RankPlacement
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.facts.manifest_report import ManifestReport
from evener.engine.facts.memory_plan import MeasuredMemory, MemoryPlan
from evener.engine.facts.worker_facts import WorkerFacts
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.wire.installed import find_commands, find_connector
from evener.engine.wire.messages import Command, LoadAdapter, UnloadAdapter
from evener.engine.wire.plan import Order, StepMasks
from evener.engine.wire.pooling import pooling_part
from evener.engine.worker.assembly import Assembly, assemble, captured_prompt_sizes, find_graph_capture, registered_name
from evener.engine.worker.graphs import StepGraphs
from evener.engine.worker.memory import measured_plan, min_across_ranks, require_memory_plan
from evener.engine.worker.runner import Runner
from evener.engine.worker.stages import PipelineChannel
from evener.engine.worker.weights import PositionTables, load_stage
from evener.loading.loader import WeightBytes
from evener.plugins.discover import installed_catalog
from evener.resolution.buckets import capture_sizes

log = logging.getLogger("evener.worker")


class Worker:
    """Runs plans on one device. The constructor loads the model, which may take minutes.

    Args:
        search: finds the backend.
        serving: the run is a server.
        ranks: this worker's rank, or its open groups; None for a worker without others. All workers of a run are
            constructed at the same time, and get the same plans in the same order.

    Raises:
        EvenerError: the configuration cannot be served, or does not fit the device.
    """

    def __init__(
        self, config: Config, search: BackendSearch, serving: bool = False,
        ranks: RankGroups | RankPlacement | None = None,
    ) -> None:  # fmt: skip
        began = time.monotonic()
        start = stage_part("assemble") if has_unlike_stages(config) else assemble
        a: Assembly = start(config, search, serving, ranks)
        resolved, plan = require_memory_plan(a)
        resolved, plan = min_across_ranks(a, resolved, plan)
        #: The model and everything that it runs with.
        self.assembly = a = replace(a, config=resolved)
        positions = PositionTables(a)
        loaded = load_stage(a)
        if a.draft is not None:
            loaded += load_stage(a.draft)
        length, size = resolved.max_seq_len, a.geometry.block_size
        tables = DeviceTables(a.device, resolved.max_reqs, length, a.geometry.spans, size)
        stages = None if a.ranks.pp is None else PipelineChannel(a.ranks, a.model.hidden_size, resolved.dtype, tables)
        rows = installed_catalog().lazy_imports("part of media").get("rows") if a.ranks.world.first_stage else None
        media = rows and rows.load()(a.device, a.model.encoders, resolved.dtype)
        self.runner = Runner(a.device, a.model, a.sampler, tables, a.geometry, a.adapters, stages, media)
        self.runner.before_step = positions.ensure
        if a.placement is not None:
            self.runner.eager_forward, self.runner.replayed = a.placement.eager_forward, a.placement.replayed
        if a.pooling is not None:
            pooling_part("pooler")(a.pooling, resolved.max_reqs, self.runner)
        drafter = installed_catalog().lazy_imports("worker drafter").get(resolved.config.infer.proposes)
        self.drafter = drafter.load()(a, self.runner) if drafter else None
        #: What the draft model proposed in the step that was submitted last.
        self._proposed: Callable[[], list[list[int]]] | None = None
        self.graphs: StepGraphs | None = None
        self.mover: BlockMover | None = None
        #: Samples the step that waits for its masks. None if none waits, and on stages that do not sample.
        self._draw: Draw | None = None
        measures = resolved.kv_memory is None
        if any(a.agreement.most([measures])):  # where one stage measures, all run the step
            a.geometry.bind(1, a.device)  # a pool of one block
            self._warm_up(min(resolved.step_tokens, resolved.max_seq_len))
            if measures:
                resolved, plan = measured_plan(a, plan, a.device.memory().free)
            resolved, plan = min_across_ranks(a, resolved, plan)
            self.assembly = a = replace(a, config=resolved)
        self.runner.last_rows = a.last_rows  # the warm-up has computed all rows
        self.pool: torch.Tensor | None = a.geometry.bind(plan.blocks, a.device)
        self.graphs = self.step_graphs(a, self.runner)
        if a.draft is not None and self.drafter is not None and a.device.capabilities.max_captures is None:
            self.drafter.graphs = self.step_graphs(a.draft, self.drafter.runner)
        self._warm_up(1)
        # Last: it may open a port, which nobody would close if something above failed.
        found = find_connector(resolved.config)
        self.mover = found and found.worker(a, self.pool)
        self._report(a, plan, loaded)
        self.facts = WorkerFacts(
            specs=[g.spec for g in a.geometry.groups], cuts=[g.cut for g in a.geometry.groups], slabs=plan.blocks,
            block_size=size, max_reqs=resolved.max_reqs, max_seq_len=resolved.max_seq_len,
            step_tokens=resolved.step_tokens, info=self._info(a, plan, loaded, time.monotonic() - began),
            kept_slabs=0 if self.mover is None else self.mover.slabs,
        )  # fmt: skip

    def close(self) -> None:
        """Release what is not memory. Calling it again does nothing."""
        for part in [each for each in (self.assembly.placement, self.mover) if each is not None]:
            part.close()

    def execute(self, order: Order) -> PendingStep | None:
        """Submit one step, keep an adapter, or do a command. A step with masks is returned by the call with its
        ``StepMasks``; the call with its plan returns None, or a step with only its drafts (``StepResult.proposed``).

        Raises:
            PluginError: a kernel or state provider of a package raised an error.
        """
        try:
            if isinstance(order, LoadAdapter | UnloadAdapter):
                self.runner.adapters.keep(order)
                return None
            if isinstance(order, Command):
                return find_commands(order.name).execute(self, order)  # type: ignore[no-any-return]
            if isinstance(order, StepMasks):
                return self._draw_masked(order)
            if order.moves is not None and self.mover is not None:
                self.mover.begin(order.moves)
            plan = order
            if self.drafter is not None:
                plan, self._proposed = self.drafter.run(order)
            step = (self.graphs and self.graphs.execute(plan)) or self.runner.execute(plan)
            if isinstance(step, PendingStep):
                return self._with_reports(step)
            self._draw, said = step, PendingStep(plan, None)
            said.drafts = self._proposed  # its masks depend on them
            return said if plan.drafts and self._proposed else None
        except Exception as error:
            self.assembly.resolver.attribution.raise_attributed(error)
            raise

    def _draw_masked(self, masks: StepMasks) -> PendingStep | None:
        # Cleared at once: it holds the step's logits, and the memory plan has room for those of one step.
        draw, self._draw = self._draw, None
        if draw is None:
            return None
        with torch.inference_mode():
            return self._with_reports(draw(masks))

    def _with_reports(self, step: PendingStep) -> PendingStep:
        """``step``, with this worker's drafts, counters and transfers for its result."""
        step.drafts = self._proposed
        parts = [each for each in (self.assembly.placement, self.mover) if each is not None]
        step.counters = lambda: {name: value for part in parts for name, value in part.counters().items()}
        if self.mover is not None:
            step.transfers = self.mover.finished
        return step

    def step_graphs(self, a: Assembly, runner: Runner) -> StepGraphs | None:
        """The captured steps of a model; None if something in it cannot be captured. Notes the reason."""
        offer, why = find_graph_capture(a)
        a.resolver.manifest.notes.append(why)
        if offer is None:
            return None
        prompt_sizes, limits = captured_prompt_sizes(a), (a.config.max_seq_len, a.device.capabilities.max_captures)
        capture = JointCapture(offer.value, a.ranks.tp, a.device.torch_device) if a.ranks.tp else offer.value
        lengths = {size: a.geometry.captured_lengths(size, *limits) for size in capture_sizes(a.config.max_reqs)}
        return StepGraphs(runner, a.device, capture, lengths, prompt_sizes, a.config.max_reqs, a.config.max_seq_len)

    def _warm_up(self, tokens: int) -> None:
        """Run one step of ``tokens`` tokens over the null block, so that kernels are built before the first request."""
        if self.runner.media is not None:
            self.runner.media.warm_up()
        if (warm := self.execute(self.assembly.geometry.one_request(tokens))) is not None:
            warm.wait()

    def _report(self, a: Assembly, plan: MemoryPlan, loaded: WeightBytes) -> None:
        """Log the memory, estimated and measured, and what runs dequantized or on the reference kernels."""
        if (world := a.ranks.world).pp_size > 1:
            held = a.build.held
            log.info("stage %d of %d: layers %d to %d on backend %s, %s", world.pp_rank, world.pp_size, held.start,
                     held.stop - 1, a.loaded.backend.name, a.device.name)  # fmt: skip
        if asked := a.config.config.infer.layers:
            log.warning("infer.layers=%s: only these layers run, so the text is not the model's", ",".join(asked))
        for line in plan.lines():
            log.info("memory: %s", line)
        log.info("memory: weights estimated %d, measured %d bytes", plan.weights, loaded.allocated)
        for line in a.resolver.manifest.dequantized_lines():
            log.warning("%s", line)
        for line in a.resolver.manifest.fallback_lines() if a.config.config.max_fallback == "listed" else ():
            log.warning("only the reference serves %s", line)

    def _info(self, a: Assembly, plan: MemoryPlan, loaded: WeightBytes, seconds: float) -> EngineInfo:
        b = a.loaded.backend
        return EngineInfo(
            model=a.config.config.model, served_name=a.config.served_model_name,
            architecture=registered_name(a.checkpoint.architecture, a.loaded.architectures), pooling=a.pooling,
            max_reqs=a.config.max_reqs, max_model_len=a.config.max_seq_len, vocab_size=a.model.vocab_size,
            hidden_size=a.model.hidden_size, media_rows=a.media_rows,
            final_norm=type(a.model).normed is not Architecture.normed, encoders=sorted(a.model.encoders),
            adapters=a.adapters.limits, backend=b.name, backend_version=b.version,
            backend_reason=a.loaded.selection.reason, device=a.device.name, dtype=a.config.dtype,
            memory=MeasuredMemory(**vars(plan), measured_weights=loaded.allocated, measured_mapped=loaded.mapped,
                                  measured_host=loaded.placed),
            start_seconds=round(seconds, 2), config=a.config.values(), manifest=ManifestReport.of(a.resolver.manifest),
            layers=(a.build.held.start, a.build.held.stop),
        )  # fmt: skip
