"""Starting an engine: inline, in a thread, or in processes of its own. The same controller and worker in each."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Literal

from evener.builtin.kinds import BUILTIN_KINDS
from evener.config.resolve import plans_in_flight, wants_processes
from evener.config.schema import Config
from evener.contracts.state import StateKind
from evener.distributed.launched import Launched
from evener.engine.client import EngineClient
from evener.engine.controller import Controller
from evener.engine.executor import Executor, InlineExecutor
from evener.engine.messages import Ready
from evener.engine.scheduler import MicroBatches, Scheduler
from evener.engine.state import StateManager
from evener.engine.worker_facts import WorkerFacts
from evener.media.planner import MediaPlanner
from evener.search import Search


def start_engine(config: Config, mode: Literal["inline", "thread", "process"]) -> EngineClient:
    """Start an engine and return the front end's end of its channel.

    Raises:
        EvenerError: what was asked for cannot be had. In mode "process" the first ``receive`` raises it.
    """
    from evener.engine.clients import InlineClient, ThreadClient

    if mode == "process":
        from evener.engine.process_client import ProcessClient

        return ProcessClient(config)
    return (InlineClient if mode == "inline" else ThreadClient)(*build_controller(config))


def build_controller(config: Config, serving: bool = False) -> tuple[Controller, Ready]:
    """A controller over workers in this process or, for a server or several ranks, in processes of their own."""
    executor, facts = _executor(config, serving)
    return control(config, executor, facts), Ready(info=facts.info)


def control(config: Config, executor: Executor, facts: WorkerFacts) -> Controller:
    """A controller over workers that are ready."""
    state = StateManager(
        facts.specs,
        _kinds(facts, config),
        facts.block_size,
        facts.blocks,
        prefix_cache=config.infer.prefix_cache,
        cuts=facts.cuts,
    )
    infer = config.infer
    prefill, decode = (None if n == "auto" else n for n in (infer.pp_prefill_reqs, infer.pp_decode_reqs))
    batches = MicroBatches(infer.pp_size, prefill, decode)
    media = MediaPlanner(facts.media_rows, facts.step_tokens)
    scheduler = Scheduler(state, facts.max_reqs, facts.step_tokens, batches=batches, media=media)
    return Controller(scheduler, executor, plans_in_flight(config))


def _executor(config: Config, serving: bool) -> tuple[Executor, WorkerFacts]:
    if wants_processes(config, serving):
        from evener.engine.process_client import ProcessExecutor

        process = ProcessExecutor(config, Launched.of(os.environ))
        return process, process.facts
    search = Search(config.backend)
    if config.infer.tp_size * config.infer.pp_size > 1:
        # For debuggers. It is kept with what tests stand on, which the engine is not built on: so it is named here, as
        # ops name their cases, and not imported.
        threads = importlib.import_module("evener.testing.rank_threads").RankThreads(config, search)
        return threads, threads.facts
    from evener.engine.worker import Worker  # imports torch, beside the probes

    worker = Worker(config, search, serving)
    return InlineExecutor(worker), worker.facts


def _kinds(facts: WorkerFacts, config: Config) -> Mapping[str, StateKind]:
    """The built-in kinds; packages are loaded here only if the model uses a kind of theirs."""
    kinds = {kind.name: kind for kind in BUILTIN_KINDS}
    if all(spec.kind in kinds for spec in facts.specs):
        return kinds
    return {p.value.name: p.value for p in Search(config.backend).load(config.options).state_kinds()}
