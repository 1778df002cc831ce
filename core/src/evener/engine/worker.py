"""The worker: one device rank. Builds the model, divides the memory, loads, warms up, then runs plans."""

from __future__ import annotations

import time
from typing import Any

from evener.config.resolve import ResolvedConfig
from evener.config.schema import Config
from evener.engine.assembly import Assembly, assemble
from evener.engine.device_tables import DeviceTables
from evener.engine.graphs import DecodeGraphs
from evener.engine.memory import MemoryPlan, activation_bytes, plan_memory
from evener.engine.messages import Sampling
from evener.engine.plan import Admission, Plan, TableUpdate
from evener.engine.runner import PendingStep, Runner
from evener.engine.search import Search
from evener.engine.state import StateManager
from evener.engine.worker_facts import WorkerFacts
from evener.loading.dummy import load_dummy
from evener.loading.estimate import estimate_weights
from evener.loading.loader import WeightBytes, load_weights
from evener.resolution.buckets import token_buckets

__all__ = ["PendingStep", "Worker", "WorkerFacts"]


class Worker:
    """Runs plans on one device. Construct builds everything and may take a while.

    Raises:
        EvenerError: what was asked for cannot be had, or does not fit.
    """

    def __init__(self, config: Config, search: Search, serving: bool = False) -> None:
        began = time.monotonic()
        self._assembly = a = assemble(config, search, serving)
        self.config: ResolvedConfig = a.config
        plan = self._plan_memory(a)
        loaded = self._load(a, config)
        tables = DeviceTables(
            a.device, a.config.max_reqs, a.config.max_seq_len, len(a.geometry.groups), a.geometry.block_size
        )
        self._pool = a.geometry.bind(plan.blocks, a.device)
        self.runner = Runner(a.device, a.model, a.sampler, tables, a.geometry, a.config.dtype)
        self._use_graphs(a)
        self._warm_up()
        self.facts = WorkerFacts(
            specs=[g.spec for g in a.geometry.groups],
            blocks=plan.blocks,
            block_size=a.geometry.block_size,
            max_reqs=a.config.max_reqs,
            max_seq_len=a.config.max_seq_len,
            step_tokens=a.config.step_tokens,
            info=self._info(a, plan, loaded, time.monotonic() - began),
        )

    @property
    def assembly(self) -> Assembly:
        """What the worker runs; for tests and ``evener explain``."""
        return self._assembly

    def execute(self, plan: Plan) -> PendingStep:
        """Submit one step."""
        return self.runner.execute(plan)

    def _plan_memory(self, a: Assembly) -> MemoryPlan:
        c = a.config
        state = StateManager([g.spec for g in a.geometry.groups], a.kinds, a.geometry.block_size, 1)
        least = state.blocks_for(c.max_seq_len, min(c.step_tokens, c.max_seq_len))
        columns = -(-c.max_seq_len // a.geometry.block_size)
        rows = (c.max_reqs + 1) * (4 * (c.max_seq_len + 1) + 20 + 4 * columns * len(a.geometry.groups))
        scratch = sum({
            g.provider.workspace(g.spec, g.attention, c.step_tokens, c.max_seq_len) for g in a.geometry.groups
        })  # fmt: skip
        return plan_memory(
            weights=estimate_weights(
                a.build.weights,
                a.resolver.packings_by_layout,
                a.checkpoint.headers or None,
                a.scheme,
                mappable=a.device.capabilities.host_memory,
            ),
            rows_bytes=rows,
            workspace=scratch + activation_bytes(a.build, c.step_tokens, c.max_reqs, a.model.vocab_size),
            geometry=a.geometry,
            memory=a.device.memory(),
            kv_bytes=c.kv_memory,
            useful_blocks=c.max_reqs * least,
            least_blocks=least,
            max_seq_len=c.max_seq_len,
        )

    def _load(self, a: Assembly, config: Config) -> WeightBytes:
        where = a.device.torch_device
        if config.load == "dummy":
            a.device.seed(config.seed)
            loaded = load_dummy(a.build.weights, a.resolver.packings_by_layout, where, config.seed)
        else:
            loaded = load_weights(
                a.build.weights, a.checkpoint, a.scheme, a.resolver.packings_by_layout, where,
                ignored=a.build.ignored, ties=a.build.ties,
            )  # fmt: skip
        for group in a.build.groups:
            group.bind()
        return loaded

    def _use_graphs(self, a: Assembly) -> None:
        """Replay decode steps where the device, every state provider and every kernel can; say why not otherwise."""
        offer = a.loaded.graph_capture(a.device) if a.config.use_cuda_graph else None
        if offer is None:
            return
        eager = [g.provider.name for g in a.geometry.groups if g.provider.graph == "never"]
        eager += sorted({c.provider for c in a.resolver.manifest.choices if not c.capturable})
        if eager:
            a.resolver.manifest.notes.append(f"steps run eagerly: {', '.join(dict.fromkeys(eager))} cannot be captured")
            return
        sizes = tuple(b.high for b in token_buckets(a.config.max_reqs))
        graphs = DecodeGraphs(self.runner, a.device, offer.value, sizes, a.config.max_reqs, a.config.max_seq_len)
        self.runner.use_graphs(graphs)
        a.resolver.manifest.notes.append(f"decode steps of up to {sizes[-1]} rows are captured by {offer.package}")

    def _warm_up(self) -> None:
        """One step of one token: kernels are built and first-call costs are paid before the first request. It writes to
        block 0."""
        a = self._assembly
        one = Plan(
            id=-1,
            admissions=[Admission(0, [0], Sampling(temperature=0.0))],
            updates=[TableUpdate(0, 0, [[0]] * len(a.geometry.groups))],
            slots=[0],
            starts=[0],
            counts=[1],
            samples=[0],
        )
        self.execute(one).wait()

    def _info(self, a: Assembly, plan: MemoryPlan, loaded: WeightBytes, seconds: float) -> dict[str, Any]:
        b = a.loaded.backend
        return {
            "model": a.config.config.model,
            "served_name": a.config.served_model_name,
            "architecture": a.checkpoint.architecture,
            "max_reqs": a.config.max_reqs,
            "max_model_len": a.config.max_seq_len,
            "vocab_size": a.model.vocab_size,
            "backend": b.name,
            "backend_version": b.version,
            "backend_reason": b.reason,
            "device": a.device.name,
            "dtype": a.config.dtype,
            "memory": {**plan.to_json(), "measured_weights": loaded.counted, "measured_mapped": loaded.mapped},
            "start_seconds": round(seconds, 2),
            "config": a.config.to_json(),
            "manifest": a.resolver.manifest.to_json(),
        }
