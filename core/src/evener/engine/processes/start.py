"""Starting an engine: inline, in a thread, or in child processes. Controller and worker are the same in each mode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from evener.backend_search import BackendSearch
from evener.builtin.kinds import BUILTIN_KINDS
from evener.config.resolve import plans_in_flight, uses_worker_processes
from evener.config.schema import Config
from evener.config.stages import config_of_stage, stage_part
from evener.contracts.state import StateKind
from evener.engine.batching.micro_batches import MicroBatches
from evener.engine.batching.step_limit import limit_steps
from evener.engine.controller.controller import Controller
from evener.engine.controller.drafts import find_drafts
from evener.engine.controller.grammars import open_grammars
from evener.engine.controller.media import open_media
from evener.engine.controller.scheduler import Scheduler
from evener.engine.controller.state import StateManager
from evener.engine.facts.worker_facts import WorkerFacts
from evener.engine.processes.launch import launched_rank
from evener.engine.wire.client import EngineClient
from evener.engine.wire.executor import Executor
from evener.engine.wire.installed import find_adapters, find_connector
from evener.engine.wire.messages import Ready
from evener.plugins.discover import installed_catalog


def start_engine(config: Config, mode: Literal["inline", "thread", "process"]) -> EngineClient:
    """Start an engine and return the client that the front end uses.

    Raises:
        EvenerError: the engine cannot start with this configuration. In mode "process" the first ``receive`` raises it.
    """
    from evener.engine.processes.local_clients import InlineClient, ThreadClient

    if mode == "process":
        from evener.engine.processes.process_client import ProcessClient

        return ProcessClient(config)
    return (InlineClient if mode == "inline" else ThreadClient)(*build_controller(config, streaming=mode != "inline"))


def build_controller(config: Config, serving: bool = False, streaming: bool = False) -> tuple[Controller, Ready]:
    """Build a controller and start its workers: in this process, or in child processes for a server or several ranks.
    ``streaming``: somebody reads the answers while they are made, as those of a server; see ``infer.step_target``.

    Raises:
        EvenerError: the engine cannot start with this configuration.
    """
    find_connector(config)  # these raise their errors before weights are read
    find_adapters(config.infer.adapter_slots)
    find_drafts(config.infer)
    if config.infer.stages:
        stage_part("check")(config)
    executor, facts = _executor(config, serving)
    try:
        return set_up_controller(config, executor, facts, serving or streaming), Ready(info=facts.info)
    except BaseException:
        executor.close()
        raise


def _executor(config: Config, serving: bool) -> tuple[Executor, WorkerFacts]:
    if uses_worker_processes(config, serving):
        from evener.engine.processes.process_executor import ProcessExecutor

        process = ProcessExecutor(config, launched_rank(os.environ))
        return process, process.facts
    search = BackendSearch(config_of_stage(config, 0).backend)
    if config.infer.tp_size * config.infer.pp_size > 1:
        return _several_ranks_inline(config, search)
    # Imported here: ``search`` probes the backends in the background while this imports torch.
    from evener.engine.worker.inline_executor import InlineExecutor
    from evener.engine.worker.worker import Worker

    worker = Worker(config, search, serving)
    return InlineExecutor(worker), worker.facts


def _several_ranks_inline(config: Config, search: BackendSearch) -> tuple[Executor, WorkerFacts]:
    why = "executor=inline with more than one rank is for debugging and"
    instead = "evener-inspection, or leave executor=inline out"
    threads = installed_catalog().need("executor", "inline", why, instead)(config, search)
    return threads, threads.facts


def set_up_controller(config: Config, executor: Executor, facts: WorkerFacts, streaming: bool = False) -> Controller:
    """A controller over workers that are ready, whose ``facts`` these are; ``streaming`` as in ``build_controller``."""
    infer, kinds = config.infer, _kinds(facts, config)
    # Nobody reads vectors and scores while they are made.
    limit = limit_steps(config, facts.max_reqs, streaming and facts.info.pooling is None)
    state = StateManager(facts.specs, kinds, facts.block_size, facts.slabs, infer.prefix_cache, facts.cuts)
    media, batches = open_media(facts.info.media_rows, facts.step_tokens), MicroBatches.of(infer)
    found, lora, drafts = find_connector(config), find_adapters(infer.adapter_slots), find_drafts(infer)
    grammars = open_grammars(config, facts.info.vocab_size)
    scheduler = Scheduler(state, facts.max_reqs, facts.step_tokens, batches=batches, media=media, limit=limit,
                          grammars=grammars, drafts=drafts and drafts.controller(facts, grammars),
                          adapters=lora and lora.controller(infer),
                          connector=found and found.controller(config, facts, state))  # fmt: skip
    # Last: they may have threads, which nobody would end if something above failed.
    state.pool.listeners += installed_catalog().answers("cache listener", config, facts)
    return Controller(scheduler, limit.wrap(executor), plans_in_flight(config), config.serve.max_queue)


def _kinds(facts: WorkerFacts, config: Config) -> Mapping[str, StateKind]:
    """The state kinds by name. Other packages are loaded only if the model uses a kind that is not built in."""
    kinds = {kind.name: kind for kind in BUILTIN_KINDS}
    if all(spec.kind in kinds for spec in facts.specs):
        return kinds
    first = config_of_stage(config, 0)
    return {p.value.name: p.value for p in BackendSearch(first.backend).load(first.options).state_kinds()}
