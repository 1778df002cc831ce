"""The kernel that would run each op of a model here, its state, weights and memory plan, and why; as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.config.stages import config_of_stage, device_of_rank, has_unlike_stages, stage_part
from evener.contracts.declared import StackedWeight
from evener.errors import CheckpointError

if TYPE_CHECKING:
    from evener.config.resolve import ResolvedConfig
    from evener.engine.facts.manifest_report import OpChoice
    from evener.engine.facts.memory_plan import MemoryPlan
    from evener.engine.worker.assembly import Assembly

#: Files that hold weights, or an index of them.
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.gguf")
#: The note about stages on different backends.
_MEASURED = ("stages are shown with equal numbers of layers; at the first start, layers are divided by the time of one "
             "on each device, unless infer.pp_layer_partition is set")  # fmt: skip
_WEIGHTS_OF = {"auto": "read from its files", "dummy": "random numbers"}


def explain(config: Config) -> dict[str, Any]:
    """What a run of ``config`` would use, as plain data. A folder without weight files is explained from its
    ``config.json`` alone.

    Raises:
        EvenerError: as when the engine starts. A model that does not fit, or weights with wrong names or shapes, are
            no error but part of the result (``problem``).
    """
    search = BackendSearch(config_of_stage(config, 0).backend)
    from evener.engine.facts.manifest_report import ManifestReport
    from evener.engine.worker.assembly import find_graph_capture
    from evener.engine.worker.memory import estimate_memory_plan

    described = config.load == "auto" and not _has_weights(Path(config.model))
    a, *others = planned_ranks(dataclasses.replace(config, load="dummy") if described else config, search)
    stages = [_stage(each, *estimate_memory_plan(each)) for each in (a, *others)] if others else []
    resolved, plan = estimate_memory_plan(a)
    notes = [_MEASURED] if has_unlike_stages(config) and not resolved.config.infer.pp_layer_partition else []
    problems = [f"stage {row['stage']}: {row['memory']['problem']}" for row in stages if row["memory"]["problem"]]
    plan = dataclasses.replace(plan, problem="\n".join(problems) or plan.problem)
    largest = resolved.step_tokens, resolved.max_seq_len
    report = ManifestReport.of(a.resolver.manifest)
    rows = [row for row in report.ops if row.op == "attention"]
    offer, graphs = find_graph_capture(a)
    backend = a.loaded.backend
    return {
        "model": {
            "path": config.model, "architecture": a.checkpoint.architecture, "dtype": resolved.dtype,
            "weights": "described by config.json alone" if described else _WEIGHTS_OF[config.load],
            "problem": _weight_mismatch(a),
        },
        "backend": {
            "name": backend.name, "version": backend.version, "reason": a.loaded.selection.reason,
            "device": a.device.name,
        },
        "stages": stages,
        "state": list(_state(a, rows)),
        "ops": msgspec.to_builtins([row for row in report.ops if row.op != "attention"]),
        "attention": msgspec.to_builtins(rows),
        "packings": report.packings,
        "dequantized": report.dequantized,
        "activations": report.activations,
        "communicator": _communicator(a),
        "graphs": {"package": None if offer is None else offer.package, "reason": graphs},
        "memory": {**plan.to_json(), "lines": [*plan.lines(), *_scratch(a, *largest)]},
        "fallbacks": report.fallbacks,
        "notes": [*report.notes, *notes, *_divided_experts(a)],
        "config": msgspec.to_builtins(resolved.values()),
    }  # fmt: skip


def planned_ranks(config: Config, search: BackendSearch) -> list[Assembly]:
    """The first rank's part of the model; with ``infer.stages``, that of each stage's first rank. Stages settle what
    they have in common as when they run."""
    from evener.distributed.world import RankGroups, World
    from evener.engine.worker.assembly import assemble
    from evener_inspection.absent_ranks import ExplainCommunicator
    from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads

    tp_size, pp_size = config.infer.tp_size, config.infer.pp_size
    tp = ExplainCommunicator("tp", tp_size) if tp_size > 1 else None
    if not config.infer.stages:
        return [assemble(config, search, ranks=RankGroups(World.of(0, tp_size, pp_size), tp=tp))]
    stage_part("check")(config)
    configs = [config_of_stage(config, stage) for stage in range(pp_size)]
    # Packages are imported here: threads would import them at the same time.
    for stage, own in enumerate(configs):
        (BackendSearch(own.backend) if stage else search).load(own.options)

    def one(group: ThreadCommunicator) -> Assembly:
        rank, own = group.rank * tp_size, configs[group.rank]
        index, alike = device_of_rank(config, rank, rank, tp_size * pp_size)
        place = RankGroups(World.of(rank, tp_size, pp_size), tp, group, group, index, alike)
        if has_unlike_stages(config):
            return stage_part("assemble")(own, BackendSearch(own.backend), ranks=place, measure=False)  # type: ignore[no-any-return]
        return assemble(own, BackendSearch(own.backend), ranks=place)

    return run_on_threads(pp_size, one, "pp")


def _stage(a: Assembly, config: ResolvedConfig, plan: MemoryPlan) -> dict[str, Any]:
    from evener.engine.worker.assembly import find_graph_capture

    return {
        "stage": a.ranks.world.pp_rank, "backend": a.loaded.backend.name, "device": a.device.name,
        "layers": [a.build.held.start, a.build.held.stop], "block_size": a.geometry.block_size,
        "dtype": config.dtype, "graphs": find_graph_capture(a)[1], "memory": plan.to_json(),
    }  # fmt: skip


def _divided_experts(a: Assembly) -> Iterator[str]:
    """Which experts this rank has, if other ranks have others."""
    held = {w.held for w in a.build.weights if isinstance(w, StackedWeight) and w.held.whole > w.experts}
    groups = a.config.config.infer.ep_size
    for each in sorted(held, key=lambda span: (span.whole, span.start)):
        slices = f", each in {a.config.config.infer.tp_size // groups} slices" if groups < a.ranks.world.tp_size else ""
        yield (f"rank {a.ranks.world.rank} has experts {each.start} to {each.stop - 1} of {each.whole}{slices}: "
               f"infer.ep_size={groups}")  # fmt: skip


def _has_weights(path: Path) -> bool:
    return not path.is_dir() or any(any(path.glob(pattern)) for pattern in _WEIGHTS)


def _weight_mismatch(a: Assembly) -> str | None:
    """Which tensors are missing, unexpected or of a wrong shape, by the files' headers; None if all match, or if no
    file was read."""
    from evener.loading.match import check_match

    try:
        if a.headers:
            builds = (a.build, *a.other_stages)
            check_match(a.build.weights, a.headers, a.scheme, builds, str(a.checkpoint.path))
    except CheckpointError as error:
        return str(error)
    return None


def _state(a: Assembly, rows: Sequence[OpChoice]) -> Iterator[dict[str, Any]]:
    size, refused = a.geometry.block_size, {row.provider: row.refused for row in rows}
    labels = {candidate.value: candidate.label for candidate in a.resolver.available.states}
    for group in a.geometry.groups:
        provider = labels.get(group.provider, "reference")
        yield {
            "kind": group.spec.kind, "window": group.spec.window, "layers": len(group.slots), "per": group.spec.per,
            "tensors": [f"{t.name} {list(t.shape)} {t.dtype}" for t in group.spec.tensors], "provider": provider,
            "block_size": size, "layer_bytes_per_block": group.provider.bytes_per_block(group.spec, size),
            "graph": group.provider.graph, "refused": msgspec.to_builtins(refused[provider]),
        }  # fmt: skip


def _scratch(a: Assembly, step: int, longest: int) -> list[str]:
    """Which kernel or state provider needs the largest scratch memory, for a step of ``step`` tokens of sequences of at
    most ``longest``; empty if none needs any."""
    asked = [(g.provider.workspace(g.spec, g.attention, step, longest), g.provider.name) for g in a.geometry.groups]
    nbytes, who = max((a.resolver.footprint.workspace, a.resolver.footprint.workspace_owner), *asked)
    return [f"the workspace holds {nbytes / (1 << 20):.1f} MiB of scratch memory for {who}"] if nbytes else []


def _communicator(a: Assembly) -> dict[str, Any]:
    infer = a.config.config.infer
    ranks, offer = infer.tp_size * infer.pp_size * infer.dp_size, a.loaded.communicator()
    return {"ranks": ranks, "package": None if offer is None else offer.package, "used": ranks > 1}
