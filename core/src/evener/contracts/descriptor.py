"""The descriptor: a package's self-description as plain data. Core reads it before it imports anything else of it.

An entry point in one of the groups below names a ``Descriptor``, in a module that does not import torch::

    [project.entry-points."evener.backends"]
    mychip = "evener_backend_mychip:descriptor"

Core reads the descriptor, checks its contract versions and tags, and imports ``module`` only if the package is chosen.
``module`` has the hook implementations (see ``evener.contracts.hooks``). What the hooks return must match the names in
the descriptor: nothing missing, and nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

#: Contract versions that this core supports, inclusive: ``{contract: (oldest, newest)}``. A change that breaks a
#: contract raises its version, so that a package built for an older one is refused with both numbers.
CORE_CONTRACTS: Mapping[str, tuple[int, int]] = MappingProxyType({
    "descriptor": (1, 1), "probe": (2, 2), "device": (2, 2), "ops": (2, 2), "state": (2, 2), "communicator": (2, 2),
    "graph": (1, 1), "quant": (2, 3), "experts": (1, 1), "architecture": (2, 2), "checkpoint": (1, 1),
    "layers": (2, 2), "request_plugin": (1, 1), "generation": (1, 1),
})  # fmt: skip

#: Entry-point groups, in the order in which they are read.
GROUPS = ("evener.backends", "evener.kernels", "evener.graphs", "evener.collectives", "evener.plugins")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a package, set as ``<package name>.<key>=value``.

    Attributes:
        type: the type of its values. Text from a command line is converted (``"8"``, ``"true"``).
        default: the value if the user sets none; of ``type``, or None.
        help: one sentence, shown by ``evener config``.
        choices: the allowed values; empty: any.
    """

    type: type[int] | type[float] | type[str] | type[bool]
    default: Any
    help: str
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """The description of one package.

    Attributes:
        name: the entry point's name, unique in its group: lower case letters, digits, ``-`` and ``_``, first a letter
            or digit. A backend's name is the value of ``--backend``.
        summary: one sentence.
        contracts: the version of each contract that it implements, e.g. ``{"probe": 2, "device": 2, "ops": 2}``.
            Required: ``probe`` and ``device`` for a backend, ``communicator`` for collectives, ``graph`` for graphs,
            ``ops`` for ``ops`` and ``op_schemas``, ``state`` for ``states``, ``state_kinds`` and ``state_formats``,
            ``quant`` for ``formats`` and ``quantizers``, ``architecture`` for ``architectures`` and
            ``pooling_readers``, ``request_plugin`` for ``request_plugins``, ``checkpoint`` for ``checkpoints``,
            ``weight_files``, ``checkpoint_views``, ``adapter_readers``, ``tokenizer_readers`` and ``model_sources``,
            ``generation`` for ``chat_readers``, ``tool_parsers``, ``reasoning_parsers``, ``grammars``,
            ``grammar_masks``, ``drafters`` and ``draft_policies``.
        module: dotted path of the module with the hook implementations. It may import anything. A package that only
            announces ``module:Class`` paths (architectures, commands, request plugins) needs none.
        probe: (backends) dotted path of a torch-free module with ``marks()`` and ``probe()``; see
            ``evener.contracts.probe``.
        probe_timeout: (backends, optional) time limit of ``probe()`` in seconds, with the imports it needs.
        serves: (backends) tags that kernels, graphs and collectives may need, e.g. ``{"triton", "namespace:mychip"}``.
        needs: (kernels, graphs, collectives, plugins) tags; the chosen backend must serve all of them.
        evidence: (optional) how far it is verified: the level (``L0`` imports and installs, ``L1`` calls match the
            vendor's signatures, ``L2`` its shape inference, ``L3`` whole engine on a simulated device, ``L4`` kernels
            compiled for the target, ``L5`` real hardware), a colon, and what ran where and when. ``evener doctor``
            prints it.
        options: the package's own options; values are checked before anything is imported.
        aliases: (optional) settings that the package translates to others, e.g.
            ``{"infer.attn_type=mychip": "ops.attention=mychip"}``.
        ops: (optional) names of ops for which ``evener_kernels`` returns kernels.
        op_schemas: (optional) names of ops that the package adds with ``evener_op_schemas``.
        states: (optional) names of the state providers that ``evener_state_providers`` returns.
        state_kinds: (optional) names of state kinds that ``evener_state_kinds`` returns.
        formats: (optional) names of the quantization schemes that ``evener_quant_schemes`` returns.
        architectures: (optional) ``{"ArchitectureName": "module:Class"}``; imported when a checkpoint names one.
        commands: (optional) ``{"name": "module:function"}``: CLI commands.
        request_plugins: (optional) ``{"name": "module:Class"}``.
        tool_parsers: (optional) readers of a model's tool calls, ``{"name": "module:Class"}``.
        reasoning_parsers: (optional) readers of a model's reasoning, ``{"name": "module:Class"}``.
        grammars: (optional) engines for structured output, ``{"name": "module:Class"}``.
        drafters: (optional) what proposes tokens in speculative decoding, ``{"name": "module:Class"}``.
        draft_policies: (optional, for packages pinned to their core's version) what says which requests get drafts,
            ``{"name": "module:Class"}``; see ``evener.contracts.generation.drafts``.
        worker_drafters: (optional, for packages pinned to their core's version) ``{"name": "module:Class"}``: what
            finds the ids of a drafter of the same name in the worker, as ``evener.engine.worker.worker`` constructs it.
        checkpoints: (optional) readers of single files, ``{".ending": "module:Class"}``; imported when one is opened.
        weight_files: (optional) readers of weight files in a model folder, ``{"single_name.ending": "module:Class"}``.
        checkpoint_views: (optional) checkpoints over others, with other files, names or numbers,
            ``{"name": "module:Class"}``. See ``evener.contracts.conversion.views``.
        state_formats: (optional) functions that decide which state is quantized, ``{"name": "module:function"}``; see
            ``evener.contracts.quantized``.
        quantizers: (optional) what quantizes weights while they are read, ``{"name": "module:Class"}``; the name is a
            value of ``quant=``. See ``evener.contracts.conversion.quantizer``.
        pooling_readers: (optional) functions that say how a model embeds or scores texts,
            ``{"name": "module:function"}``; see ``evener.contracts.pooling``.
        pooling_parts: (optional, for packages pinned to their core's version) ``{"choose": "module:function", "limits":
            "module:function", "outputs": "module:function", "pooler": "module:Class", "rows": "module:Class",
            "vectors": "module:Class"}``: see ``evener.contracts.pooling``.
        media_parts: (optional, for packages pinned to their core's version) ``{"checks": "module:function", "planner":
            "module:Class", "rows": "module:Class"}``: see ``evener.contracts.media``.
        adapter_readers: (optional) functions that read adapters (LoRA) from folders,
            ``{"name": "module:function"}``; see ``evener.contracts.adapters``.
        tokenizer_readers: (optional) functions that read a model's tokenizer, ``{"name": "module:function"}``; see
            ``evener.contracts.tokenizer``.
        chat_readers: (optional) functions that read how a model writes conversations, ``{"name": "module:function"}``;
            see ``evener.contracts.generation.chat``.
        tuning: (optional) dotted path of a folder in the package with files that ``evener tune`` wrote (``*.json``);
            they are read if the package is chosen.
        model_sources: (optional) functions that download models by name, ``{"name": "module:function"}``. The function
            takes the model's name, whether weights are needed, and the package's options, and returns a path or
            None.
        executors: (optional, for packages pinned to their core's version) ``{"inline": "module:Class"}``: runs several
            ranks in one process; constructed with the configuration and the search for a backend.
        grammar_masks: (optional, for packages pinned to their core's version) ``{"name": "module:function"}``: makes
            what gives the steps of requests with a grammar their masks; see ``engine.controller.grammars``.
        adapters: (optional, for packages pinned to their core's version) ``{"name": "module:Class"}``: computes with
            adapters (LoRA); see ``evener.contracts.adapters``.
        weight_makers: (optional, for packages pinned to their core's version) ``{"name": "module:function"}``: fills
            weights, ``dummy`` for ``load=dummy`` and ``cache`` for ``model_cache``; called as
            ``evener_inspection.dummy_weights.load_dummy`` and ``evener_model_cache.cached_weights.load_cached``.
        old_spellings: (optional, for packages pinned to their core's version) ``{"name": "module:Class"}``: rewrites
            keys of before; see ``evener.config.old_spellings``.
        config_readers: (optional, for packages pinned to their core's version) ``{"name": "module:function"}``: makes
            the configuration of a command line and a file; called as ``evener_keys.command_line.from_command_line``.
        stage_parts: (optional, for packages pinned to their core's version) ``{"check": "module:function", …}``: what
            stages on unlike devices need: ``settle``, ``check``, ``config``, ``device``, ``meet`` and ``assemble``,
            called as functions of ``evener_stages``, and ``split``, which says how many layers each stage gets.
        launchers: (optional, for packages pinned to their core's version) ``{"torchrun": "module:Class"}``: knows the
            ranks that a launcher has started; called as ``evener_torchrun.ranks.TorchrunEnv``.
        placements: (optional, for packages pinned to their core's version) ``{"host": "module:Class"}``: a
            ``Placement`` of experts (``evener.contracts.experts``), as ``evener.engine.worker.placement`` constructs
            it.
        connectors: (optional, for packages pinned to their core's version) ``{"host": "module:Class"}``: keeps state
            that leaves the prefix cache; see ``evener.contracts.connector``.
        cache_listeners: (optional, for packages pinned to their core's version) ``{"name": "module:function"}``: makes
            what hears of blocks that enter and leave the prefix cache, or returns None; called with the configuration
            and the worker's facts; see ``engine.controller.blocks``.
        step_limits: (optional, for packages pinned to their core's version) ``{"name": "module:function"}``: makes what
            limits the tokens of a server's steps, or returns None; called with the configuration and how many requests
            run at once. The first is used. See ``engine.batching.step_limit``.
        engine_commands: (optional, for packages pinned to their core's version) ``{"weights": "module:Class"}``: what
            the engine does between steps, beside requests; see ``engine.wire.installed``.
    """

    name: str
    summary: str
    contracts: Mapping[str, int]
    module: str | None = None
    probe: str | None = None
    probe_timeout: float = 20.0
    serves: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    evidence: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ops: tuple[str, ...] = ()
    op_schemas: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    state_kinds: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    architectures: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    request_plugins: Mapping[str, str] = field(default_factory=dict)
    tool_parsers: Mapping[str, str] = field(default_factory=dict)
    reasoning_parsers: Mapping[str, str] = field(default_factory=dict)
    grammars: Mapping[str, str] = field(default_factory=dict)
    drafters: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    weight_files: Mapping[str, str] = field(default_factory=dict)
    checkpoint_views: Mapping[str, str] = field(default_factory=dict)
    model_sources: Mapping[str, str] = field(default_factory=dict)
    executors: Mapping[str, str] = field(default_factory=dict)
    launchers: Mapping[str, str] = field(default_factory=dict)
    stage_parts: Mapping[str, str] = field(default_factory=dict)
    old_spellings: Mapping[str, str] = field(default_factory=dict)
    config_readers: Mapping[str, str] = field(default_factory=dict)
    weight_makers: Mapping[str, str] = field(default_factory=dict)
    grammar_masks: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, str] = field(default_factory=dict)
    connectors: Mapping[str, str] = field(default_factory=dict)
    cache_listeners: Mapping[str, str] = field(default_factory=dict)
    step_limits: Mapping[str, str] = field(default_factory=dict)
    engine_commands: Mapping[str, str] = field(default_factory=dict)
    state_formats: Mapping[str, str] = field(default_factory=dict)
    quantizers: Mapping[str, str] = field(default_factory=dict)
    pooling_readers: Mapping[str, str] = field(default_factory=dict)
    pooling_parts: Mapping[str, str] = field(default_factory=dict)
    media_parts: Mapping[str, str] = field(default_factory=dict)
    adapter_readers: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    tokenizer_readers: Mapping[str, str] = field(default_factory=dict)
    chat_readers: Mapping[str, str] = field(default_factory=dict)
    draft_policies: Mapping[str, str] = field(default_factory=dict)
    worker_drafters: Mapping[str, str] = field(default_factory=dict)
    tuning: str | None = None
