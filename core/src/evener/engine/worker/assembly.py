"""Assembly: from a configuration to a model that is declared and resolved, before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from evener.backend_search import BackendSearch
from evener.config.checkpoint import facts_of
from evener.config.resolve import DeviceFacts, ResolvedConfig, layer_numbers, layer_partition, resolve_config
from evener.config.schema import Config
from evener.config.stages import has_unlike_stages, stage_part
from evener.contracts.adapters import AdapterStacks
from evener.contracts.architecture import Architecture
from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.declared import LinearWeight
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.placement import Placement
from evener.contracts.pooling import PoolingRequest, PoolingSettings
from evener.contracts.quant import QuantScheme
from evener.contracts.state import StateKind
from evener.distributed.agreement import ALONE, Agreement
from evener.distributed.communicators import communicator_factory
from evener.distributed.world import RankGroups, RankPlacement
from evener.engine.quantized.state import choose_state
from evener.engine.sampling.sampler import Sampler
from evener.engine.wire.installed import find_adapters
from evener.engine.wire.pooling import choose_pooling, pooling_part
from evener.engine.worker.geometry import Geometry, plan_geometry
from evener.engine.worker.last_rows import LastRows
from evener.errors import ArchitectureError, ConfigError, did_you_mean
from evener.layers.builder import Builder
from evener.loading.checkpoint import open_checkpoint
from evener.loading.scheme import Unquantized
from evener.loading.views import stored_partition, view_checkpoint
from evener.plugins.catalog import Provided
from evener.plugins.discover import core_version, installed_catalog
from evener.plugins.load import LoadedPackages
from evener.resolution.buckets import captured_prompts, token_buckets
from evener.resolution.candidates import Candidates
from evener.resolution.footprint import Sizes
from evener.resolution.resolver import Resolver
from evener.tuning_files.measurements import BenchEnvironment, read_tuned


@dataclass(frozen=True)
class Assembly:
    """A declared and resolved model on an opened device.

    Attributes:
        headers: of the checkpoint; empty for random weights.
        media_rows: how many rows of media the worker keeps.
        agreement: with the stages on other backends, if there are any.
        other_stages: the other pipeline stages, declared.
        pooling: how the model embeds or scores texts; None: it generates text.
        adapters: the slots for adapters.
        placement: of the experts that are not on the device.
        last_rows: the last layer for sampled rows only; None: steps compute all rows.
        draft: the draft model; its resolver, geometry and device are this one's.
    """

    config: ResolvedConfig
    loaded: LoadedPackages
    device: Device
    checkpoint: Checkpoint
    headers: Headers
    scheme: QuantScheme
    build: Builder
    model: Architecture
    sampler: Sampler
    resolver: Resolver
    geometry: Geometry
    kinds: Mapping[str, StateKind]
    ranks: RankGroups
    media_rows: int
    agreement: Agreement
    adapters: AdapterStacks
    other_stages: Sequence[Builder] = ()
    pooling: PoolingSettings | None = None
    placement: Placement | None = None
    last_rows: LastRows | None = None
    draft: Assembly | None = None


class StoredModel(NamedTuple):
    """A model as an open checkpoint stores it, and the class that runs it."""

    checkpoint: Checkpoint
    headers: Headers
    scheme: QuantScheme
    family: type[Architecture]


def assemble(
    config: Config, search: BackendSearch, serving: bool = False, ranks: RankGroups | RankPlacement | None = None
) -> Assembly:
    """Choose the backend, open its device, connect to the other ``ranks``, declare this rank's part of the model and
    resolve it.

    Raises:
        EvenerError: a backend, package, checkpoint or option cannot be used; see the tree in ``evener.errors``.
    """
    # What there is: the checkpoint, the backend, its device, and the class that runs the model.
    place = ranks or RankGroups()
    checkpoint = open_checkpoint(config.model)
    config, reasons = _divided_as_stored(config, checkpoint)
    loaded = search.load(config.options)
    device = loaded.open_device(place.device)
    family = find_architecture(loaded, checkpoint)

    # The configuration with numbers in place of ``auto``. A model that generates nothing sets other limits.
    longest = family.longest_text(checkpoint.config)
    generates, infer = longest is None and checkpoint.architecture in loaded.architectures, config.infer
    pooling = choose_pooling(PoolingRequest(checkpoint, infer.task, infer.pooling, generates, longest), family)
    if longest is not None:
        config, reasons = pooling_part("limits")(config, longest)
    facts = facts_of(config.model, checkpoint.config, family.max_positions)
    of_device = DeviceFacts.of(device, loaded.backend.name, place.local_size)
    resolved = resolve_config(config, facts, of_device, serving=serving)
    resolved = replace(resolved, reasons={**resolved.reasons, **reasons})
    device.limit_threads(resolved.threads)
    device.select()

    # The other ranks. Stages on unlike devices settle on one configuration.
    factory, agreement = communicator_factory(loaded.communicator(), device), ALONE
    if has_unlike_stages(config):
        place, agreement, resolved = stage_part("meet")(place, factory, device, resolved, of_device)
    ranks = place.open(factory)
    infer, world = resolved.config.infer, ranks.world

    # The model, declared; all stages are, for the names of their weights, and so that block ids mean the same on each.
    stored = view_model(resolved, loaded, ranks, checkpoint, family)
    checkpoint, headers, scheme, _ = stored
    head, settings = (None, None) if pooling is None else (pooling.head, pooling.settings)
    declared = [declare_model(resolved, ranks, stored, stage, head) for stage in range(world.pp_size)]
    builds = [each for each, _ in declared]
    build, model = declared[world.pp_rank]
    if headers and isinstance(checkpoint, CheckpointView):
        checkpoint.reslice(build.weights)
    if infer.ep_size > 1 and not any(site.op == "moe_block" for each in builds for site in each.sites):
        raise ConfigError(f"infer.ep_size={infer.ep_size}: {config.model} has no experts; leave infer.ep_size out")
    linear = [weight for weight in build.weights if isinstance(weight, LinearWeight)]
    if infer.quant_activations == "keep":
        _keep_activations(linear)
    sampler = Sampler(build, model.vocab_size)
    encoders = [encoder for _, stage in declared for encoder in stage.encoders.values()]
    media_rows = max([resolved.step_tokens, *(encoder.rows for encoder in encoders)])

    # Parts of packages, which change or add declarations: where experts are, how state is stored, what proposes drafts.
    resolver = _resolver(resolved, loaded, device, max([0, *(encoder.tokens for encoder in encoders)]))
    placer = host_placement(resolved, device)
    auto = "auto" in (infer.cpu_layer_num, infer.resident_experts)
    placement = placer(resolved, device, resolver, build, builds) if placer and not auto else None
    resolver.manifest.notes += choose_state(builds, infer, checkpoint, headers, device, loaded)
    drafter = installed_catalog().lazy_imports("worker drafter").get(infer.proposes)
    draft = drafter.load().declare(resolved, loaded, device, ranks, model, build) if drafter else None

    # Providers of it all. Call sites come last: kernels read the layouts, and adapters compute some products instead.
    other_stages = [each for each in builds if each is not build]
    own: list[Builder] = [build, draft.build] if draft else [build]
    resolver.states([slot for each in (build, *other_stages, *own[1:]) for slot in each.slots])
    linear += [weight for each in own[1:] for weight in each.weights if isinstance(weight, LinearWeight)]
    resolver.packings([weight for weight in linear if weight.placement is None])
    lora = find_adapters(infer.adapter_slots)
    adapters = lora.worker(build, infer, builds) if lora else AdapterStacks()
    resolver.sites([site for each in own for site in each.sites])
    last_rows = LastRows(model, resolver) if placement is None and pooling is None and not draft else None

    # The pool, where a draft model has its state too.
    size = None if resolved.block_size == "auto" else resolved.block_size
    slots = [[slot for part in (each, *own[1:]) for slot in part.slots] for each in builds]
    geometry = plan_geometry(slots[world.pp_rank], device.capabilities.alignment, size, slots, agreement)
    _check_drafts(infer.proposes, geometry)
    resolved = resolved.with_value("infer.block_size", geometry.block_size, "every state provider offers it")
    kinds = {p.value.name: p.value for p in loaded.state_kinds()}
    a = Assembly(
        resolved, loaded, device, checkpoint, headers, scheme, build, model, sampler, resolver, geometry, kinds,
        ranks, media_rows, agreement, adapters, other_stages, settings, placement, last_rows,
    )  # fmt: skip
    if draft:
        a = replace(a, draft=draft.beside(a))
    if placer is None or not auto:
        return a
    # Only now is it known how many experts fit into the device's memory. With that number all is assembled once more.
    asked, key = placer.settled(a)
    a = assemble(replace(config, infer=asked), search, serving, ranks)
    reasons = {**a.config.reasons, f"infer.{key}": "what fits into the device's memory"}
    return replace(a, config=replace(a.config, reasons=reasons))


def _keep_activations(linear: Sequence[LinearWeight]) -> None:
    """Let linear layers take their inputs as they are, also where the checkpoint says that these are quantized."""
    for weight in linear:
        weight.parts = tuple(replace(part, format=replace(part.format, activation=None)) for part in weight.parts)


def _check_drafts(proposes: str, geometry: Geometry) -> None:
    """Refuse drafts where a provider of recurrent state would keep what wrong ones have written."""
    stuck = [g.provider.name for g in geometry.groups if g.spec.per == "request" and not g.provider.drafts]
    if stuck and proposes != "none":
        raise ConfigError(f"drafts of {proposes!r} need recurrent state that leaves wrong drafts out, and {stuck[0]} "
                          "keeps none; set ops.attention=reference, or leave infer.drafter and infer.draft_model "
                          "out")  # fmt: skip


def view_model(
    config: ResolvedConfig, loaded: LoadedPackages, ranks: RankGroups, checkpoint: Checkpoint,
    family: type[Architecture], draft: bool = False,
) -> StoredModel:  # fmt: skip
    """How the weights of an open checkpoint are read. ``quant`` and ``weight_map`` are not about a ``draft`` model."""
    asked, world = config.config, ranks.world
    if asked.load == "dummy" and not checkpoint.config.get("quantization_config"):
        return StoredModel(checkpoint, {}, Unquantized(), family)
    quant, weight_map = ("auto", None) if draft else (asked.quant, asked.weight_map)
    checkpoint, scheme = view_checkpoint(ViewRequest(
        checkpoint, family, [p.value for p in loaded.quant_schemes()], config.max_seq_len, quant,
        weight_map, asked.options, (world.tp_rank, world.tp_size), (world.pp_rank, world.pp_size),
        layer_partition(asked.infer), asked.infer.ep_size,
    ))  # fmt: skip
    return StoredModel(checkpoint, checkpoint.headers, scheme, family)


def declare_model(
    config: ResolvedConfig, ranks: RankGroups, stored: StoredModel, stage: int = 0,
    head: Callable[..., Any] | None = None,
) -> tuple[Builder, Architecture]:  # fmt: skip
    """A pipeline stage's part of a model, declared; ``head``: as in ``Builder``."""
    infer, world = config.config.infer, ranks.world
    checkpoint, headers, scheme, family = stored
    made = Builder if infer.ep_size == 1 else installed_catalog().need(
        "placement of experts", "ranks", "infer.ep_size", "evener-offload")(infer.ep_size)  # fmt: skip
    build = made(
        config.dtype, config.max_seq_len, (lambda name: scheme.part(name, headers)) if headers else None,
        ranks.tp, absorb=infer.mla_absorb, index_top=None if infer.index_topk == "auto" else infer.index_topk,
        snapshot_every=infer.snapshot_every,
        state_dtype={"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}.get(infer.kv_dtype),
        stage=(stage, world.pp_size), partition=layer_partition(infer), predicts=infer.proposes == "mtp",
    )  # fmt: skip
    build.head, build.chosen = head, layer_numbers("infer.layers", infer.layers)
    model = family(checkpoint.config, build)
    if (world.pp_size > 1 or infer.layers) and not build.staged:
        raise ArchitectureError(f"{family.__name__} does not divide its layers: set infer.pp_size=1, no infer.layers")
    return build, model


def _divided_as_stored(config: Config, checkpoint: Checkpoint) -> tuple[Config, Mapping[str, str]]:
    """The configuration with the division of layers that the checkpoint was split for, if it asks for none; and the
    reason."""
    needless = config.infer.pp_size == 1 or config.infer.pp_layer_partition or config.load == "dummy"
    if needless or (stored := stored_partition(checkpoint)) is None:
        return config, {}
    infer = replace(config.infer, pp_layer_partition=tuple(map(str, stored)) or ("equal",))
    return replace(config, infer=infer), {"infer.pp_layer_partition": "as the checkpoint was split"}


def host_placement(config: ResolvedConfig, device: Device) -> Any | None:
    """The ``Placement`` of experts in host memory, as a class; None if the configuration names none, or the device
    is the host. It is constructed with the configuration, the device and its resolver, and the builders of this rank's
    stage and of all stages. Then the weights and call sites of the experts that the configuration names have the
    placement. Its ``settled`` takes an assembly without a placement; it returns the ``infer`` keys with a number in
    place of ``auto``, and the name of the key that it set.

    Raises:
        ConfigError: no installed package has it.
    """
    infer = config.config.infer
    key = next((k for k in ("resident_experts", "cpu_layer_num", "host_experts") if getattr(infer, k)), None)
    if key is None or device.capabilities.host_memory:
        return None
    name = "resident" if infer.resident_experts else "host"
    return installed_catalog().need("placement of experts", name, f"infer.{key}", "evener-offload")


def find_graph_capture(a: Assembly) -> tuple[Provided[GraphCapture] | None, str]:
    """What captures this model's decode steps, and a note for the manifest; None if steps run eagerly, and why."""
    capture = a.loaded.graph_capture(a.device)
    if a.pooling is not None:
        return None, "steps run eagerly: the model generates nothing"
    if not a.device.capabilities.graphs:
        return None, f"steps run eagerly: {a.device.name} does not support graphs (DeviceCapabilities.graphs)"
    if a.placement is not None and (why := a.placement.eager) is not None:
        return None, f"steps run eagerly: experts of {len(a.placement.layers)} layers are in host memory{why}"
    if not a.config.use_cuda_graph or capture is None:
        asked = f"infer.use_cuda_graph=false, {a.config.reasons['infer.use_cuda_graph']}"
        return None, f"steps run eagerly: {asked if capture else 'no package captures steps of this device'}"
    eager = [g.provider.name for g in a.geometry.groups if g.provider.graph == "never"]
    eager += sorted({c.provider for c in a.resolver.manifest.choices if not c.capturable})
    if eager:
        return None, f"steps run eagerly: {', '.join(dict.fromkeys(eager))} cannot be captured"
    steps, sizes = f"decode steps of up to {a.config.max_reqs} rows", captured_prompt_sizes(a)
    lengths = a.geometry.captured_lengths(1, a.config.max_seq_len, a.device.capabilities.max_captures)
    steps += f" (apart for contexts of up to {', '.join(map(str, lengths))} tokens)" if lengths[1:] else ""
    steps += f" and single prompts of up to {sizes[-1]} tokens" if sizes else ""
    return capture, f"{steps} are captured by {capture.package}"


def captured_prompt_sizes(a: Assembly) -> tuple[int, ...]:
    """Numbers of tokens of a prompt whose step may be captured, ascending. Empty where a state provider cannot do that,
    where the device holds few captures (decode steps need them more), and where experts are in host memory: what such a
    step runs depends on where they are computed."""
    able = a.geometry.captures_prompts() and a.device.capabilities.max_captures is None and a.placement is None
    return captured_prompts(min(a.config.step_tokens, a.config.max_seq_len)) if able else ()


def registered_name(architecture: str, known: Collection[str]) -> str:
    """The name in ``known`` of the class that computes transformers' ``architecture``: ``XForCausalLM`` also computes
    ``XModel`` and ``XForSequenceClassification``. ``architecture`` itself if there is none."""
    full = re.sub(r"(Model|ForSequenceClassification)$", "ForCausalLM", architecture)
    return full if architecture not in known and full in known else architecture


def find_architecture(loaded: LoadedPackages, checkpoint: Checkpoint) -> type[Architecture]:
    """The class that an installed package registers for a checkpoint.

    Raises:
        ArchitectureError: no package does.
    """
    name = registered_name(checkpoint.architecture, loaded.architectures)
    if (target := loaded.architectures.get(name)) is None:
        similar, unusable = did_you_mean(name, loaded.architectures), "".join(loaded.selection.report.unusable_hints)
        raise ArchitectureError(
            f"{checkpoint.path} asks for architecture {name!r}, which no installed package registers{similar} Type "
            f"`evener models` for what is installed, and pip install evener-models or the package of the model's "
            f"author{unusable}")  # fmt: skip
    return target.load()  # type: ignore[no-any-return]


def _resolver(config: ResolvedConfig, loaded: LoadedPackages, device: Device, encoded: int) -> Resolver:
    import torch

    from evener.ops.reference.linear import PLAIN
    from evener.ops.reference.state import ReferenceState

    infer = config.config.infer
    kernels, states = loaded.kernels(device), loaded.state_providers(device)
    provided: list[Provided[Any]] = [*kernels, *states]
    bench = BenchEnvironment.of(device, {each.package: each.version for each in provided}, str(torch.__version__))
    folders = [p.descriptor.tuning for p in loaded.selection.all_packages if p.descriptor.tuning]
    available = Candidates(
        schemas={p.value.name: p.value for p in loaded.op_schemas()},
        kernels=kernels, states=states, reference_state=ReferenceState(), reference_packing=PLAIN,
        device=device.capabilities, buckets=token_buckets(max(config.step_tokens, config.max_samples, encoded)),
        reference_ops="infer.op_impl=ref" if infer.op_impl == "ref" else "",
        reference_attention="infer.attn_type=ref" if infer.attn_type == "ref" else "",
        tuned=read_tuned(infer.tuning, bench, folders), forced=config.config.ops, version=core_version(),
        max_fallback=config.config.max_fallback, sizes=Sizes(max(config.step_tokens, encoded), config.max_samples),
    )  # fmt: skip
    resolver = Resolver(available)
    resolver.manifest.notes += available.tuned.notes
    return resolver
