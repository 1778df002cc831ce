"""The worker: one device rank. Builds the model, divides the memory, loads, warms up, then runs plans."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from evener.config.resolve import ResolvedConfig
from evener.config.schema import Config
from evener.distributed.joint_capture import JointCapture
from evener.distributed.world import Place, Ranks
from evener.engine.assembly import Assembly, assemble, capture_offer
from evener.engine.device_tables import DeviceTables
from evener.engine.graphs import DecodeGraphs
from evener.engine.memory import MemoryPlan
from evener.engine.messages import Sampling
from evener.engine.plan import Admission, Plan, TableUpdate
from evener.engine.provision import provision
from evener.engine.runner import PendingStep, Runner
from evener.engine.stages import Stages
from evener.engine.worker_facts import WorkerFacts
from evener.loading.dummy import load_dummy
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.match import beside
from evener.media.store import MediaStore
from evener.resolution.buckets import ladder
from evener.search import Search

__all__ = ["PendingStep", "Worker", "WorkerFacts"]

log = logging.getLogger("evener.worker")
#: Of the memory that a warm-up leaves, how much state may take; allocators round up and libraries keep some back.
_MEASURED_SHARE = 0.95


class Worker:
    """Runs plans on one device. Construct builds everything and may take a while.

    Args:
        ranks: this worker's place among others, or with it its ends of their groups; by default it is alone. All
            workers of a group are constructed at the same time and given the same plans in the same order.

    Raises:
        EvenerError: what was asked for cannot be had, or does not fit.
    """

    def __init__(
        self, config: Config, search: Search, serving: bool = False, ranks: Ranks | Place | None = None
    ) -> None:  # fmt: skip
        began = time.monotonic()
        a = assemble(config, search, serving, ranks)
        resolved, plan = provision(a)
        resolved, plan = self._agree(a, resolved, plan)
        self._assembly = a = replace(a, config=resolved)
        loaded = self._load(a, config)
        length, size = resolved.max_seq_len, a.geometry.block_size
        tables = DeviceTables(a.device, resolved.max_reqs, length, a.geometry.spans, size)
        stages = None if a.ranks.pp is None else Stages(a.ranks, a.model.hidden_size, resolved.dtype, tables)
        media = MediaStore(a.device, a.model.encoders, resolved.dtype) if a.ranks.world.first_stage else None
        self.runner = Runner(a.device, a.model, a.sampler, tables, a.geometry, stages, media)
        self._graphs: DecodeGraphs | None = None
        if resolved.kv_memory is None:
            resolved, plan = self._agree(a, resolved, self._measure(a, plan))
        self._pool = a.geometry.bind(plan.blocks, a.device)
        self._graphs = self._decode_graphs(a)
        self._warm_up(1)
        self._report(a, plan, loaded)
        self.facts = WorkerFacts(
            specs=[g.spec for g in a.geometry.groups],
            cuts=[g.cut for g in a.geometry.groups],
            blocks=plan.blocks,
            block_size=size,
            max_reqs=resolved.max_reqs,
            max_seq_len=length,
            step_tokens=resolved.step_tokens,
            media_rows=a.media_rows,
            info=self._info(a, plan, loaded, time.monotonic() - began),
        )

    @property
    def assembly(self) -> Assembly:
        """What the worker runs; for tests and ``evener explain``."""
        return self._assembly

    def execute(self, plan: Plan) -> PendingStep:
        """Submit one step.

        Raises:
            PluginError: a package's kernel or state provider raised something.
        """
        try:
            replayed = self._graphs.execute(plan) if self._graphs is not None else None
            return replayed or self.runner.execute(plan)
        except Exception as error:
            self._assembly.resolver.makers.blame(error)
            raise

    def _agree(self, a: Assembly, config: ResolvedConfig, plan: MemoryPlan) -> tuple[ResolvedConfig, MemoryPlan]:
        """All ranks run the same plans: the shortest longest request and the smallest pool hold for each."""
        length, blocks = a.ranks.least([config.max_seq_len, plan.blocks], a.device.torch_device)
        if length < config.max_seq_len:
            config = config.with_value("infer.max_seq_len", length, "what the memory for state holds on every rank")
        return config, replace(plan, blocks=blocks, state=blocks * plan.block_bytes)

    def _measure(self, a: Assembly, plan: MemoryPlan) -> MemoryPlan:
        """State gets what is left after a step at the largest bucket over one block of pool, not an estimate."""
        a.geometry.bind(1, a.device)
        self._warm_up(min(a.config.step_tokens, a.config.max_seq_len))
        left = int(a.device.memory().free * _MEASURED_SHARE)
        blocks = min(plan.blocks, left // plan.block_bytes)
        if blocks < plan.blocks:
            log.info("state gets %d blocks instead of %d: a warm-up left %d MiB", blocks, plan.blocks, left >> 20)
        return replace(plan, blocks=blocks, state=blocks * plan.block_bytes)

    def _load(self, a: Assembly, config: Config) -> WeightBytes:
        where = a.device.torch_device
        if config.load == "dummy":
            a.device.seed(config.seed)
            loaded = load_dummy(a.build.weights, a.resolver.packings_by_layout, where, config.seed)
        else:
            loaded = load_weights(
                a.build.weights, a.checkpoint, a.scheme, a.resolver.packings_by_layout, where,
                through=a.device, **beside(a.build, a.others),
            )  # fmt: skip
        for group in a.build.groups:
            group.bind()
        return loaded

    def _decode_graphs(self, a: Assembly) -> DecodeGraphs | None:
        """Replay decode steps where the device, every state provider and every kernel can; say why not otherwise."""
        offer, why = capture_offer(a)
        a.resolver.manifest.notes.append(why)
        if offer is None:
            return None
        sizes = ladder(a.config.max_reqs)
        capture = JointCapture(offer.value, a.ranks.tp, a.device.torch_device) if a.ranks.tp else offer.value
        return DecodeGraphs(self.runner, a.device, capture, sizes, a.config.max_reqs, a.config.max_seq_len)

    def _warm_up(self, tokens: int) -> None:
        """One step of so many tokens, over the null block: kernels are built and first-call costs are paid before the
        first request."""
        a = self._assembly
        if self.runner.media is not None:
            self.runner.media.warm_up()
        columns = -(-tokens // a.geometry.block_size)
        step = Plan(
            id=-1, admissions=[Admission(0, [0] * tokens, Sampling(temperature=0.0))],
            updates=[TableUpdate(0, 0, [[0] * columns] * len(a.geometry.groups))],
            slots=[0], starts=[0], counts=[tokens], samples=[0],
        )  # fmt: skip
        self.execute(step).wait()

    def _report(self, a: Assembly, plan: MemoryPlan, loaded: WeightBytes) -> None:
        """The log's account of the start: memory, estimated and measured, and what runs on the reference."""
        for line in plan.lines():
            log.info("memory: %s", line)
        log.info("memory: weights estimated %d, measured %d bytes", plan.weights, loaded.counted)
        for line in a.resolver.manifest.dequantized_lines():
            log.warning("%s", line)
        if a.config.config.max_fallback == "listed":
            for line in a.resolver.manifest.fallback_lines():
                log.warning("only the reference serves %s", line)

    def _info(self, a: Assembly, plan: MemoryPlan, loaded: WeightBytes, seconds: float) -> dict[str, Any]:
        b = a.loaded.backend
        return {
            "model": a.config.config.model,
            "served_name": a.config.served_model_name,
            "architecture": a.checkpoint.architecture,
            "max_reqs": a.config.max_reqs,
            "max_model_len": a.config.max_seq_len,
            "vocab_size": a.model.vocab_size,
            "hidden_size": a.model.hidden_size,
            "media_rows": a.media_rows,
            "encoders": sorted(a.model.encoders),
            "backend": b.name,
            "backend_version": b.version,
            "backend_reason": a.loaded.selection.reason,
            "device": a.device.name,
            "dtype": a.config.dtype,
            "memory": {**plan.to_json(), "measured_weights": loaded.counted, "measured_mapped": loaded.mapped},
            "start_seconds": round(seconds, 2),
            "config": a.config.to_json(),
            "manifest": a.resolver.manifest.to_json(),
        }
