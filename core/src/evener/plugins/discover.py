"""Discovery: read and check the entry points and descriptors of all installed packages; nothing else of them is
imported. A start needs the catalog at many places, and reads it once: all of them ask ``installed_catalog``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import importlib_metadata

from evener.contracts.descriptor import CORE_CONTRACTS, GROUPS, Descriptor, Option
from evener.errors import (
    ContractVersionError,
    DescriptorError,
    DuplicateNameError,
    PluginError,
    UnknownNameError,
    did_you_mean,
)
from evener.plugins.catalog import LAZY_IMPORT_FIELDS, Catalog, Disabled, Origin, Package, Problem
from evener.plugins.guard import guarded
from evener.plugins.hook_check import describe_exception

#: Descriptor fields whose names must be unique among all installed packages, and the word for one in messages.
_UNIQUE = {**LAZY_IMPORT_FIELDS, "op_schemas": "op", "state_kinds": "state kind", "formats": "quantization scheme"}
#: Variables that switch packages off and on.
SWITCHES = ("EVENER_DISABLE_PLUGINS", "EVENER_PLUGINS")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_EVIDENCE = re.compile(r"L[0-5]: .+")
_TUPLES = ("ops", "op_schemas", "states", "state_kinds", "formats")
#: The contract that is implemented by whoever announces something in a field, or has an entry point in a group.
_IMPLIED: Mapping[str, str] = {
    "ops": "ops", "op_schemas": "ops", "states": "state", "state_kinds": "state", "formats": "quant",
    "architectures": "architecture", "request_plugins": "request_plugin", "checkpoints": "checkpoint",
    "model_sources": "checkpoint", "weight_files": "checkpoint", "tool_parsers": "generation",
    "reasoning_parsers": "generation", "grammars": "generation", "drafters": "generation", "state_formats": "state",
    "quantizers": "quant", "checkpoint_views": "checkpoint", "pooling_readers": "architecture",
    "adapter_readers": "checkpoint", "tokenizer_readers": "checkpoint", "chat_readers": "generation",
    "draft_policies": "generation", "worker_drafters": "generation", "grammar_masks": "generation",
}  # fmt: skip
_IMPLIED_BY_GROUP: Mapping[str, tuple[str, ...]] = {
    "evener.backends": ("probe", "device"), "evener.graphs": ("graph",), "evener.collectives": ("communicator",),
}  # fmt: skip


@dataclass(frozen=True)
class _Found:
    origin: Origin
    entry: importlib_metadata.EntryPoint


def discover(
    *, path: Sequence[str] | None = None, environ: Mapping[str, str] | None = None,
    builtins: Sequence[Descriptor] = (), core_contracts: Mapping[str, tuple[int, int]] = CORE_CONTRACTS,
) -> Catalog:  # fmt: skip
    """Read every descriptor. A package that cannot be used becomes a ``Problem``; the others are not affected.

    Args:
        path: folders where distributions are looked for; default ``sys.path``.
        environ: where ``EVENER_DISABLE_PLUGINS`` and ``EVENER_PLUGINS`` are read; default ``os.environ``. Both are
            comma-separated. The first switches off packages, by their own name or their distribution's; with the second
            only the listed distributions are used (empty: none).
        builtins: core's own plugins; they cannot be disabled.
        core_contracts: the contract versions that core speaks.

    Raises:
        DuplicateNameError: two packages use one name in a group, or announce one architecture, command, request plugin,
            op, state kind or quantization scheme.
        UnknownNameError: ``EVENER_PLUGINS`` lists a distribution that is not installed.
    """
    environ = os.environ if environ is None else environ
    found, problems = _find(path)
    _check_allowed(found, environ)
    usable: list[_Found] = []
    disabled: list[Disabled] = []
    for item in found:
        reason = _disabled_by(item.origin, environ)
        if reason is None:
            usable.append(item)
        else:
            disabled.append(Disabled(**vars(item.origin), reason=reason))
    # Before descriptors are imported, because a broken package still claims its name; and again with core's own.
    _check_unique((item.origin.noun, item.origin.name, item.origin) for item in usable)
    read = [_read(item, core_contracts) for item in usable]
    packages = tuple(each for each in read if isinstance(each, Package))
    problems += [each for each in read if isinstance(each, Problem)]
    found_all = Catalog(packages, tuple(problems), tuple(disabled), tuple(_unused_switches(found, environ)))
    return with_builtins(found_all, builtins)


def with_builtins(catalog: Catalog, builtins: Sequence[Descriptor]) -> Catalog:
    """``catalog`` with core's own plugins, as ``discover`` takes them; announced names must still be unique.

    Raises:
        DuplicateNameError: as ``discover``.
    """
    packages = [*catalog.packages, *_builtin_packages(builtins)]
    packages.sort(key=lambda package: (GROUPS.index(package.group), not package.builtin, package.name))
    _check_unique((package.noun, package.name, package) for package in packages)
    _check_unique(
        (what, name, package)
        for package in packages
        for field, what in _UNIQUE.items()
        for name in getattr(package.descriptor, field)
    )
    return replace(catalog, packages=tuple(packages))


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _find(path: Sequence[str] | None) -> tuple[list[_Found], list[Problem]]:
    """Entry points of our groups, ordered by group, name and distribution; of a distribution that is there twice, those
    of the first copy."""
    seen: set[str] = set()
    found: list[_Found] = []
    problems: list[Problem] = []
    for distribution in importlib_metadata.Distribution.discover(**({} if path is None else {"path": path})):
        entries = [entry for entry in distribution.entry_points if entry.group in GROUPS]
        if not entries:
            continue
        label, version, broken = _identity(distribution)
        if normalized(label) in seen:
            continue
        seen.add(normalized(label))
        for entry in entries:
            origin = Origin(group=entry.group, name=entry.name, distribution=label, version=version)
            if broken is None:
                found.append(_Found(origin, entry))
            else:
                error = DescriptorError(f"{origin}: its installed metadata cannot be read ({broken}); reinstall it")
                error.__cause__ = broken
                problems.append(Problem(**vars(origin), step="found", error=error))
    found.sort(key=lambda item: (GROUPS.index(item.origin.group), item.origin.name, item.origin.distribution))
    return found, problems


def _identity(distribution: importlib_metadata.Distribution) -> tuple[str, str, Exception | None]:
    """Name and version; if they cannot be read the folder, "?" and the error."""
    try:
        metadata = distribution.metadata  # parsed anew each time
        return str(metadata["Name"]), str(metadata["Version"]), None
    except Exception as cause:  # metadata may be broken in any way; one broken package must not stop the others
        return str(distribution.locate_file("")), "?", cause


def _names(environ: Mapping[str, str], variable: str) -> set[str]:
    return {name.strip() for name in environ.get(variable, "").split(",") if name.strip()}


def _disabled_by(origin: Origin, environ: Mapping[str, str]) -> str | None:
    for name in sorted(_names(environ, "EVENER_DISABLE_PLUGINS")):
        if name == origin.name or normalized(name) == normalized(origin.distribution):
            return f"EVENER_DISABLE_PLUGINS lists {name!r}; take it out of that variable to use the package"
    if "EVENER_PLUGINS" not in environ:
        return None
    allowed = {normalized(name) for name in _names(environ, "EVENER_PLUGINS")}
    if normalized(origin.distribution) not in allowed:
        return f"EVENER_PLUGINS does not list {origin.distribution!r}; add it there to use the package"
    return None


def _check_allowed(found: Iterable[_Found], environ: Mapping[str, str]) -> None:
    installed = {normalized(item.origin.distribution): item.origin.distribution for item in found}
    for name in sorted(_names(environ, "EVENER_PLUGINS")):
        if normalized(name) not in installed:
            raise UnknownNameError("distribution in EVENER_PLUGINS", name, installed.values(),
                                   f"(or type: pip install {name})")  # fmt: skip


def _unused_switches(found: Iterable[_Found], environ: Mapping[str, str]) -> Iterator[str]:
    known = {item.origin.name for item in found} | {normalized(item.origin.distribution) for item in found}
    for name in sorted(_names(environ, "EVENER_DISABLE_PLUGINS")):
        if name not in known and normalized(name) not in known:
            yield f"EVENER_DISABLE_PLUGINS lists {name!r}, which is not installed"


def _read(item: _Found, core_contracts: Mapping[str, tuple[int, int]]) -> Package | Problem:
    """Import one descriptor and check it."""
    origin, step = item.origin, "found"
    try:
        descriptor = check_descriptor(origin, _load(item))
        step = "contracts"
        check_contracts(origin, descriptor, core_contracts)
    except PluginError as error:
        return Problem(**vars(origin), step=step, error=error)
    return Package(**vars(origin), descriptor=descriptor)


def _load(item: _Found) -> object:
    try:
        with guarded(f"{item.origin}: its descriptor {item.entry.value!r}"):
            return item.entry.load()
    except (Exception, SystemExit) as cause:  # a package may do anything on import; the cause is kept
        failed = describe_exception(item.entry.module, cause)
        raise DescriptorError(
            f"{item.origin}: reading its descriptor {item.entry.value!r} failed with {failed}; "
            f"reinstall or uninstall {item.origin.distribution}, or fix it if it is yours"
        ) from cause


def _builtin_packages(builtins: Sequence[Descriptor]) -> Iterator[Package]:
    for builtin in builtins:
        origin = Origin(group="evener.plugins", name=builtin.name, distribution="evener", version=core_version())
        check_contracts(origin, check_descriptor(origin, builtin), CORE_CONTRACTS)
        yield Package(**vars(origin), descriptor=builtin, builtin=True)


def _check_unique(claims: Iterable[tuple[str, str, Origin]]) -> None:
    """Raise ``DuplicateNameError`` if two packages claim one name. A claim: kind of name, name, package."""
    owners: dict[tuple[str, str], Origin] = {}
    for what, name, origin in claims:
        first = owners.setdefault((what, name), origin)
        if first is not origin:
            raise DuplicateNameError(what, name, first.distribution, origin.distribution)


def check_descriptor(origin: Origin, value: object) -> Descriptor:
    """``value`` as the descriptor of ``origin``.

    Raises:
        DescriptorError: it is no ``Descriptor``, or a field of it is malformed; the message names the field.
    """
    if not isinstance(value, Descriptor):
        raise DescriptorError(
            f"{origin}: the entry point names a {type(value).__name__}, not an evener.contracts.descriptor.Descriptor"
        )
    for check in (_name_fault, _set_fault, _names_fault, _option_fault, _module_fault, _evidence_fault):
        if fault := check(origin, value):
            raise DescriptorError(f"{origin}: {fault}")
    return value


def check_contracts(origin: Origin, descriptor: Descriptor, core: Mapping[str, tuple[int, int]]) -> None:
    """Check the contract versions that ``descriptor`` names against those that ``core`` supports.

    Raises:
        ContractVersionError: core has no such contract, or supports other versions of it.
        DescriptorError: the descriptor does not name the version of a contract that it implements.
    """
    who = origin.noun
    for contract, version in descriptor.contracts.items():
        if contract not in core:
            raise ContractVersionError(
                f"{origin}: core speaks no contract {contract!r}{did_you_mean(contract, core)}; "
                f"upgrade core if {origin.distribution} is newer: pip install -U evener"
            )
        oldest, newest = core[contract]
        if not oldest <= version <= newest:
            spoken = str(newest) if oldest == newest else f"{oldest}..{newest}"
            older = "evener" if version > newest else origin.distribution
            raise ContractVersionError(
                f"{origin}: core speaks {contract} {spoken}, this {who} speaks {version}; "
                f"upgrade the older one: pip install -U {older}"
                + ("" if version <= newest else f", or, if it is yours, implement {contract} {newest}")
            )
    implied = set(_IMPLIED_BY_GROUP.get(origin.group, ()))
    implied |= {contract for field, contract in _IMPLIED.items() if getattr(descriptor, field)}
    missing = sorted(implied - set(descriptor.contracts))
    if missing:
        wanted = ", ".join(f'"{contract}": {core[contract][1]}' for contract in missing if contract in core)
        raise DescriptorError(
            f"{origin}: it implements {', '.join(missing)} without saying which version; "
            f"add {wanted} to the descriptor's contracts"
        )


def _name_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    name: Any = descriptor.name
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"name {name!r} is malformed; use lower case letters, digits, '-' and '_', a letter or digit first"
    if name != origin.name:
        return f"the descriptor is named {name!r} but its entry point {origin.name!r}; they must be equal"
    summary: Any = descriptor.summary
    if not isinstance(summary, str) or not summary:
        return f"summary must be one sentence, not {summary!r}"
    contracts: Any = descriptor.contracts
    if not isinstance(contracts, Mapping) or not all(
        isinstance(key, str) and type(version) is int for key, version in contracts.items()
    ):
        return f"contracts must map contract names to integers, not {contracts!r}"
    return None


def _set_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    for field in ("serves", "needs"):
        tags: Any = getattr(descriptor, field)
        if not isinstance(tags, Set) or not all(isinstance(tag, str) and tag for tag in tags):
            return f"{field} must be a frozenset of tags, not {tags!r}"
    return None


def _names_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    for field in _TUPLES:
        names: Any = getattr(descriptor, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
            return f"{field} must be a tuple of names, not {names!r}"
        if len(set(names)) < len(names):
            return f"{field} names something twice: {names!r}"
    for field in (*LAZY_IMPORT_FIELDS, "aliases"):
        table: Any = getattr(descriptor, field)
        if not isinstance(table, Mapping):
            return f"{field} must be a mapping, not {table!r}"
        for name, value in table.items():
            if not (isinstance(name, str) and name and isinstance(value, str)):
                return f"{field} must map names to text, not {name!r} to {value!r}"
            if field == "aliases":
                if "=" not in name or "=" not in value:
                    return f"aliases must map 'key=value' to 'key=value', not {name!r} to {value!r}"
            elif not _TARGET.fullmatch(value):
                return f"{field}[{name!r}] must read 'module:attribute', not {value!r}"
    return None


def _option_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    options: Any = descriptor.options
    if not isinstance(options, Mapping):
        return f"options must be a mapping, not {options!r}"
    for key, option in options.items():
        if not isinstance(option, Option) or option.type not in (int, float, str, bool):
            return f"options[{key!r}] must be an Option of type int, float, str or bool"
        values = (*option.choices, *(() if option.default is None else (option.default,)))
        wrong = [value for value in values if type(value) is not option.type]
        if wrong:
            return f"options[{key!r}]: {wrong[0]!r} is not {option.type.__name__}"
        if option.choices and option.default is not None and option.default not in option.choices:
            return f"options[{key!r}]: the default {option.default!r} is not among its choices {option.choices!r}"
    return None


def _module_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    backend = origin.group == "evener.backends"
    for field in ("module", "probe", "tuning"):
        path: Any = getattr(descriptor, field)
        if path is not None and not (isinstance(path, str) and _DOTTED.fullmatch(path)):
            return f"{field} must be a dotted module path, not {path!r}"
    timeout: Any = descriptor.probe_timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        return f"probe_timeout must be a number of seconds above 0, not {timeout!r}"
    if backend and descriptor.probe is None:
        return "a backend must name its probe module"
    if backend and descriptor.needs:
        return "a backend serves tags; it cannot need any"
    if not backend and (descriptor.probe is not None or descriptor.serves):
        return "only a backend has a probe and serves tags"
    delivers = [field for field in _TUPLES if getattr(descriptor, field)]
    if descriptor.module is None and (delivers or origin.group != "evener.plugins"):
        return f"it must name the module that delivers its {' and '.join(delivers) or 'hooks'}"
    return None


def _evidence_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    evidence: Any = descriptor.evidence
    if not evidence or (isinstance(evidence, str) and _EVIDENCE.fullmatch(evidence)):
        return None
    return f"its evidence is {evidence!r}; write the level first, L0 to L5, then what ran where: 'L3: …'"


def installed_catalog(builtins: Sequence[Descriptor] = ()) -> Catalog:
    """Everything installed, as ``discover`` reads it from ``sys.path`` and ``os.environ``.

    Args:
        builtins: as in ``discover``.

    Raises:
        DuplicateNameError, UnknownNameError: as ``discover``.
    """
    found = _read_installed(tuple((each, modified(each)) for each in sys.path), tuple(map(os.environ.get, SWITCHES)))
    return with_builtins(found, builtins) if builtins else found


# Metadata is found by walking ``sys.path`` and ``sys.meta_path``. While another thread's import changes one of these
# lists, the walk may miss an entry, and evener would seem not to be installed. So a process asks once.
@lru_cache(maxsize=1)
def core_version() -> str:
    """The version of the installed core."""
    return importlib_metadata.version("evener")


# The key is everything that the answer depends on, so the cache cannot be wrong for longer than importlib_metadata's
# own, which also looks at the folders' times: a package that is installed later (in a notebook, in a test's folder) and
# a changed switch are seen at the next call. An exception is not kept.
@lru_cache(maxsize=1)
def _read_installed(_folders: tuple[tuple[str, int], ...], _switches: tuple[str | None, ...]) -> Catalog:
    return discover()


def modified(folder: str) -> int:
    """When a package was last added to a folder of ``sys.path`` or removed from it, in nanoseconds; 0: no folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
