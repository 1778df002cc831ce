"""Parts that a descriptor announces by name, beside what its hooks return. All are optional, and each is imported when
it is first needed, without the package's ``module``.

Most are a mapping ``{"name": "module:Class"}`` or ``{"name": "module:function"}``. ``FormatParts`` and
``GenerationParts`` are for every package. ``PinnedParts`` are modules of core that come in distributions of their own:
core constructs and calls them as it does its own, and no contract version protects them. So a package that announces
one has to be pinned to its core's version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class FormatParts:
    """What reads a model's files, or changes how they are read.

    Attributes:
        weight_files: readers of weight files in a model folder, ``{"single_name.ending": "module:Class"}``.
        checkpoint_views: checkpoints over others, with other files, names or numbers, ``{"name": "module:Class"}``. See
            ``evener.contracts.conversion.views``.
        tokenizer_readers: functions that read a model's tokenizer, ``{"name": "module:function"}``; see
            ``evener.contracts.tokenizer``.
        chat_readers: functions that read how a model writes conversations, ``{"name": "module:function"}``; see
            ``evener.contracts.generation.chat``.
        adapter_readers: functions that read adapters (LoRA) from folders, ``{"name": "module:function"}``; see
            ``evener.contracts.adapters``.
        pooling_readers: functions that say how a model embeds or scores texts, ``{"name": "module:function"}``; see
            ``evener.contracts.pooling``.
        quantizers: quantize weights while they are read, ``{"name": "module:Class"}``; the name is a value of
            ``quant=``. See ``evener.contracts.conversion.quantizer``.
        state_formats: functions that decide which state is quantized, ``{"name": "module:function"}``; see
            ``evener.contracts.quantized``.
    """

    weight_files: Mapping[str, str] = field(default_factory=dict)
    checkpoint_views: Mapping[str, str] = field(default_factory=dict)
    tokenizer_readers: Mapping[str, str] = field(default_factory=dict)
    chat_readers: Mapping[str, str] = field(default_factory=dict)
    adapter_readers: Mapping[str, str] = field(default_factory=dict)
    pooling_readers: Mapping[str, str] = field(default_factory=dict)
    quantizers: Mapping[str, str] = field(default_factory=dict)
    state_formats: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GenerationParts:
    """What reads or directs the text that a model generates.

    Attributes:
        tool_parsers: readers of a model's tool calls, ``{"name": "module:Class"}``.
        reasoning_parsers: readers of a model's reasoning, ``{"name": "module:Class"}``.
        grammars: engines for structured output, ``{"name": "module:Class"}``.
        drafters: propose tokens in speculative decoding, ``{"name": "module:Class"}``.
    """

    tool_parsers: Mapping[str, str] = field(default_factory=dict)
    reasoning_parsers: Mapping[str, str] = field(default_factory=dict)
    grammars: Mapping[str, str] = field(default_factory=dict)
    drafters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PinnedParts:
    """Parts of core that a package brings, all optional.

    Attributes:
        draft_policies: say which requests get drafts, ``{"name": "module:Class"}``; see
            ``evener.contracts.generation.drafts``.
        worker_drafters: ``{"name": "module:Class"}``: finds, in the worker, the ids of the drafter with the same name;
            constructed as in ``evener.engine.worker.worker``.
        pooling_parts: ``{"choose": "module:function", "limits": "module:function", "outputs": "module:function",
            "pooler": "module:Class", "rows": "module:Class", "vectors": "module:Class"}``: see
            ``evener.contracts.pooling``.
        media_parts: ``{"checks": "module:function", "planner": "module:Class", "rows": "module:Class"}``: see
            ``evener.contracts.media``.
        executors: ``{"inline": "module:Class"}``: runs several ranks in one process; constructed with the configuration
            and the search for a backend.
        grammar_masks: ``{"name": "module:function"}``: makes the object that gives steps the masks of requests with a
            grammar; see ``engine.controller.grammars``.
        adapters: ``{"name": "module:Class"}``: computes with adapters (LoRA); see ``evener.contracts.adapters``.
        weight_makers: ``{"name": "module:function"}``: fills weights, ``dummy`` for ``load=dummy`` and ``cache`` for
            ``model_cache``; called as ``evener_inspection.dummy_weights.load_dummy`` and
            ``evener_model_cache.cached_weights.load_cached``.
        old_spellings: ``{"name": "module:Class"}``: rewrites legacy keys; see ``evener.config.old_spellings``.
        config_readers: ``{"name": "module:function"}``: makes the configuration of a command line and a file; called as
            ``evener_keys.command_line.from_command_line``.
        stage_parts: ``{"check": "module:function", …}``: functions for stages on unlike devices: ``settle``, ``check``,
            ``config``, ``device``, ``meet`` and ``assemble``, called as those of ``evener_stages``, and ``split``,
            which says how many layers each stage gets.
        launchers: ``{"torchrun": "module:Class"}``: knows the ranks that a launcher has started; called as
            ``evener_torchrun.ranks.TorchrunEnv``.
        placements: ``{"host": "module:Class"}``: a ``Placement`` of experts (``evener.contracts.placement``), as
            ``evener.engine.worker.assembly`` constructs it.
        connectors: ``{"host": "module:Class"}``: keeps state that leaves the prefix cache; see
            ``evener.contracts.connector``.
        cache_listeners: ``{"name": "module:function"}``: makes an object that is told which blocks enter and leave the
            prefix cache, or returns None; called with the configuration and the worker's facts; see
            ``engine.controller.blocks``.
        step_limits: ``{"name": "module:function"}``: makes the ``StepLimit`` of a server's steps, or returns None;
            called with the configuration and how many requests run at once. The first is used. See
            ``engine.batching.step_limit``.
        engine_commands: ``{"weights": "module:Class"}``: work between steps, other than requests; see
            ``engine.wire.installed``.
    """

    draft_policies: Mapping[str, str] = field(default_factory=dict)
    worker_drafters: Mapping[str, str] = field(default_factory=dict)
    pooling_parts: Mapping[str, str] = field(default_factory=dict)
    media_parts: Mapping[str, str] = field(default_factory=dict)
    executors: Mapping[str, str] = field(default_factory=dict)
    grammar_masks: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    weight_makers: Mapping[str, str] = field(default_factory=dict)
    old_spellings: Mapping[str, str] = field(default_factory=dict)
    config_readers: Mapping[str, str] = field(default_factory=dict)
    stage_parts: Mapping[str, str] = field(default_factory=dict)
    launchers: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, str] = field(default_factory=dict)
    connectors: Mapping[str, str] = field(default_factory=dict)
    cache_listeners: Mapping[str, str] = field(default_factory=dict)
    step_limits: Mapping[str, str] = field(default_factory=dict)
    engine_commands: Mapping[str, str] = field(default_factory=dict)
