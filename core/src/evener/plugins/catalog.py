"""The catalog: what is installed, as read from descriptors, before anything else of a package is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evener.contracts.descriptor import Descriptor
from evener.errors import PluginError
from evener.plugins.target import Target

#: What a package of each group is called in messages.
NOUNS: Mapping[str, str] = {
    "evener.backends": "backend",
    "evener.kernels": "kernel package",
    "evener.graphs": "graph package",
    "evener.collectives": "collective package",
    "evener.plugins": "plugin",
}
#: What a name of each field that lists lazy targets is called.
LAZY: Mapping[str, str] = {
    "architectures": "architecture",
    "commands": "command",
    "request_plugins": "request plugin",
    "checkpoints": "checkpoint reader",
    "model_sources": "model source",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where an entry point comes from: its group and name, and the distribution that brought it."""

    group: str
    name: str
    distribution: str
    version: str

    @property
    def noun(self) -> str:
        """ "backend", "kernel package", …"""
        return NOUNS[self.group]

    @property
    def key(self) -> str:
        """Unique among the packages of a catalog."""
        return f"{self.group}:{self.name}"

    def __str__(self) -> str:
        return f"{self.noun} {self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, kw_only=True)
class Package(Origin):
    """A package whose descriptor was read and can be used. ``builtin``: it is core's own."""

    descriptor: Descriptor
    builtin: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem(Origin):
    """A package that cannot be used. ``step`` (``found``, ``contracts``) is what failed; ``error`` has the cause."""

    step: str
    error: PluginError


@dataclass(frozen=True, kw_only=True)
class Disabled(Origin):
    """A package that the operator switched off; nothing of it was imported. ``reason`` names the variable."""

    reason: str


@dataclass(frozen=True)
class Catalog:
    """Everything installed.

    Attributes:
        packages: usable ones, ordered by group, then name.
        problems: unusable ones, with the cause.
        disabled: switched-off ones.
        warnings: one line each.
    """

    packages: tuple[Package, ...] = ()
    problems: tuple[Problem, ...] = ()
    disabled: tuple[Disabled, ...] = ()
    warnings: tuple[str, ...] = ()

    def in_group(self, group: str) -> tuple[Package, ...]:
        """The usable packages of one entry-point group."""
        return tuple(package for package in self.packages if package.group == group)

    @property
    def backends(self) -> tuple[Package, ...]:
        """The usable packages of the group ``evener.backends``."""
        return self.in_group("evener.backends")

    def commands(self) -> dict[str, Target]:
        """CLI commands of every usable package."""
        return targets(self.packages, "command")


def targets(packages: Iterable[Package], kind: str) -> dict[str, Target]:
    """The lazy targets of one kind (``architecture``, ``command``, ``request plugin``, ``checkpoint reader``, ``model
    source``) that ``packages`` announce, by name; nothing is imported until one is loaded."""
    field = next(field for field, called in LAZY.items() if called == kind)
    return {
        name: Target(kind=kind, name=name, path=path, package=package.name, distribution=package.distribution)
        for package in packages
        for name, path in getattr(package.descriptor, field).items()
    }
