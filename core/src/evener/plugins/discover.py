"""Discovery: read the entry points and descriptors of everything installed, and nothing more of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import importlib_metadata

from evener.contracts.descriptor import CORE_CONTRACTS, GROUPS, Descriptor
from evener.errors import DescriptorError, DuplicateNameError, PluginError, UnknownNameError
from evener.plugins.catalog import LAZY, Catalog, Disabled, Origin, Package, Problem
from evener.plugins.delivered import told
from evener.plugins.guard import torch_free
from evener.plugins.validate import check_contracts, check_descriptor

#: Announcements that must be unique among everything installed, and what one is called.
_UNIQUE = {**LAZY, "op_schemas": "op", "state_kinds": "state kind", "formats": "quantization scheme"}


@dataclass(frozen=True)
class _Found:
    origin: Origin
    entry: importlib_metadata.EntryPoint


def discover(
    *,
    path: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    builtins: Sequence[Descriptor] = (),
    core_contracts: Mapping[str, tuple[int, int]] = CORE_CONTRACTS,
) -> Catalog:
    """Read every descriptor.

    A package that cannot be used becomes a ``Problem`` of that package alone.

    Args:
        path: folders where distributions are looked for; default ``sys.path``.
        environ: where ``EVENER_DISABLE_PLUGINS`` and ``EVENER_PLUGINS`` are read; default ``os.environ``. Both are
            comma-separated. The first switches off packages by their own name or their distribution's; the second
            allows only the distributions it lists (the empty string: none).
        builtins: core's own plugins, registered through the same hooks as others'; they cannot be disabled.
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
    # Before descriptors are imported, for a broken one still claims its name; and again with core's own.
    _check_unique((item.origin.noun, item.origin.name, item.origin) for item in usable)
    packages = list(_builtin_packages(builtins))
    for item in usable:
        read = _read(item, core_contracts)
        if isinstance(read, Package):
            packages.append(read)
        else:
            problems.append(read)
    packages.sort(key=lambda package: (GROUPS.index(package.group), not package.builtin, package.name))
    _check_unique((package.noun, package.name, package) for package in packages)
    _check_unique(
        (what, name, package)
        for package in packages
        for field, what in _UNIQUE.items()
        for name in getattr(package.descriptor, field)
    )
    warnings = tuple(_unused_switches(found, environ))
    return Catalog(tuple(packages), tuple(problems), tuple(disabled), warnings)


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _find(path: Sequence[str] | None) -> tuple[list[_Found], list[Problem]]:
    """Entry points of our groups, ordered by group, name and distribution; the first copy of a distribution wins."""
    where = {} if path is None else {"path": path}
    seen: set[str] = set()
    found: list[_Found] = []
    problems: list[Problem] = []
    for distribution in importlib_metadata.Distribution.discover(**where):
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
    """Name and version, and why they cannot be read."""
    try:
        return str(distribution.metadata["Name"]), str(distribution.version), None
    except Exception as cause:  # whatever another installer left behind: one broken package must not stop the rest
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
            raise UnknownNameError(
                "distribution in EVENER_PLUGINS", name, installed.values(), f"(or type: pip install {name})"
            )


def _unused_switches(found: Iterable[_Found], environ: Mapping[str, str]) -> Iterator[str]:
    known = {item.origin.name for item in found} | {normalized(item.origin.distribution) for item in found}
    for name in sorted(_names(environ, "EVENER_DISABLE_PLUGINS")):
        if name not in known and normalized(name) not in known:
            yield f"EVENER_DISABLE_PLUGINS lists {name!r}, which is not installed"


def _read(item: _Found, core_contracts: Mapping[str, tuple[int, int]]) -> Package | Problem:
    """Import one descriptor and judge it."""
    origin = item.origin
    step = "found"
    try:
        descriptor = check_descriptor(origin, _load(item))
        step = "contracts"
        check_contracts(origin, descriptor, core_contracts)
    except PluginError as error:
        return Problem(**vars(origin), step=step, error=error)
    return Package(**vars(origin), descriptor=descriptor)


def _load(item: _Found) -> object:
    try:
        with torch_free():
            return item.entry.load()
    except (Exception, SystemExit) as cause:  # anything a stranger's module may do on import; the cause is kept
        raise DescriptorError(
            f"{item.origin}: reading its descriptor {item.entry.value!r} failed with {told(item.entry.module, cause)}; "
            f"reinstall or uninstall {item.origin.distribution}, or mend it, if it is yours"
        ) from cause


def _builtin_packages(builtins: Sequence[Descriptor]) -> Iterator[Package]:
    version = importlib_metadata.version("evener") if builtins else ""
    for builtin in builtins:
        origin = Origin(group="evener.plugins", name=builtin.name, distribution="evener", version=version)
        check_contracts(origin, check_descriptor(origin, builtin), CORE_CONTRACTS)
        yield Package(**vars(origin), descriptor=builtin, builtin=True)


def _check_unique(claims: Iterable[tuple[str, str, Origin]]) -> None:
    """Each claim: what is named, its name, and by whom."""
    owners: dict[tuple[str, str], Origin] = {}
    for what, name, origin in claims:
        first = owners.setdefault((what, name), origin)
        if first is not origin:
            raise DuplicateNameError(what, name, first.distribution, origin.distribution)
