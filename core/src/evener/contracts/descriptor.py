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

from evener.contracts.parts import FormatParts, GenerationParts, PinnedParts

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
class Descriptor(FormatParts, GenerationParts, PinnedParts):
    """The description of one package. It also has the fields of its bases.

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
        checkpoints: (optional) readers of single files, ``{".ending": "module:Class"}``; imported when one is opened.
        tuning: (optional) dotted path of a folder in the package with files that ``evener tune`` wrote (``*.json``);
            they are read if the package is chosen.
        model_sources: (optional) functions that download models by name, ``{"name": "module:function"}``. The function
            takes the model's name, whether weights are needed, and the package's options, and returns a path or
            None.
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
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    model_sources: Mapping[str, str] = field(default_factory=dict)
    tuning: str | None = None
