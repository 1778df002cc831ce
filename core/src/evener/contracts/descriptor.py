"""The descriptor: what a package is, as plain data, before anything of it is imported.

An entry point in one of the groups below names a ``Descriptor`` in a torch-free module::

    [project.entry-points."evener.backends"]
    mychip = "evener_backend_mychip:descriptor"

Core reads the descriptor, checks its contract versions and tags, and imports ``module`` only when the package was
chosen. ``module`` holds the hook implementations (see ``evener.contracts.hooks``); what the hooks deliver must match
the names that the descriptor carries, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

#: Contract versions that this core speaks, inclusive: ``{contract: (oldest, newest)}``.
CORE_CONTRACTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    dict.fromkeys(
        ("descriptor", "probe", "device", "ops", "state", "communicator", "graph", "quant", "experts", "architecture",
         "checkpoint", "layers", "request_plugin"),
        (1, 1),
    )
)  # fmt: skip

#: Entry-point groups, in the order in which they are read.
GROUPS = ("evener.backends", "evener.kernels", "evener.graphs", "evener.collectives", "evener.plugins")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a package, set as ``<package name>.<key>=value``.

    Attributes:
        type: the type of its values. Text is converted (``"8"``, ``"true"``), as it comes from a command line.
        default: the value when nobody sets it; of ``type``, or None.
        help: one sentence for ``evener config``.
        choices: the only values allowed; empty means any.
    """

    type: type[int] | type[float] | type[str] | type[bool]
    default: Any
    help: str
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What one package is.

    Attributes:
        name: the entry point's name, unique inside its group; lower case letters, digits, ``-`` and ``_``, a letter or
            digit first. A backend's name is what ``--backend`` takes.
        summary: one sentence.
        contracts: the version of each contract that it implements, e.g. ``{"probe": 1, "device": 1, "ops": 1}``.
            Needed: ``probe`` and ``device`` for a backend, ``communicator`` for collectives, ``graph`` for graphs,
            ``ops`` for ``ops`` and ``op_schemas``, ``state`` for ``states`` and ``state_kinds``, ``quant`` for
            ``formats``, ``architecture`` for ``architectures``, ``request_plugin`` for ``request_plugins``,
            ``checkpoint`` for ``checkpoints`` and ``model_sources``.
        module: dotted path of the module that holds the hook implementations. It may import anything. Not needed by a
            package that only carries lazy names (architectures, commands, request plugins).
        probe: (backends) dotted path of a torch-free module with ``marks()`` and, unless its marks alone decide,
            ``probe()``; see ``evener.contracts.probe``.
        probe_timeout: (backends, optional) seconds that ``probe()`` may take, with the imports it needs.
        serves: (backends) tags that kernels, graphs and collectives may need, e.g. ``{"triton", "namespace:mychip"}``.
        needs: (kernels, graphs, collectives, plugins) tags of which the chosen backend must serve all.
        evidence: (optional) how far it is verified, on what and when: the level (``L0`` imports and installs, ``L1``
            calls match the vendor's signatures, ``L2`` its shape inference, ``L3`` whole engine on a simulated device,
            ``L4`` kernels compiled for the target, ``L5`` silicon), a colon, and the words that ``evener doctor``
            prints.
        options: schema of the package's own options; checked before anything is imported.
        aliases: (optional) spellings that the package claims, ``{"infer.attn_type=mychip": "ops.attention=mychip"}``.
        ops: (optional) names of ops for which ``evener_kernels`` delivers kernels.
        op_schemas: (optional) names of ops that the package adds with ``evener_op_schemas``.
        states: (optional) names of the state providers that ``evener_state_providers`` delivers.
        state_kinds: (optional) names of state kinds that ``evener_state_kinds`` delivers.
        formats: (optional) names of the quantization schemes that ``evener_quant_schemes`` delivers.
        architectures: (optional) ``{"ArchitectureName": "module:Class"}``; imported when a checkpoint asks for one.
        commands: (optional) ``{"name": "module:function"}``: CLI commands.
        request_plugins: (optional) ``{"name": "module:Class"}``.
        checkpoints: (optional) readers of single files, ``{".ending": "module:Class"}``; imported when one is opened.
        tuning: (optional) dotted path of a folder with files that ``evener tune`` has written (``*.json``), part of the
            package; they are looked at when the package was chosen.
        model_sources: (optional) who fetches models by name, ``{"name": "module:function"}``; the function takes
            the model's name, whether weights are needed, and the package's options, and gives a path or None.
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
