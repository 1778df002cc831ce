"""The catalog: installed packages as their descriptors describe them; nothing else of a package is imported. Also
``Provided``: an object that a loaded package delivered, and where it came from."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from evener.contracts.descriptor import Descriptor
from evener.errors import ArchitectureError, ConfigError, DescriptorError, EvenerError, PluginError

#: The word for a package of each entry-point group in messages.
NOUNS: Mapping[str, str] = {
    "evener.backends": "backend", "evener.kernels": "kernel package", "evener.graphs": "graph package",
    "evener.collectives": "collective package", "evener.plugins": "plugin",
}  # fmt: skip
#: Descriptor fields that list lazy imports, and the word for one of them in messages.
LAZY_IMPORT_FIELDS: Mapping[str, str] = {
    "architectures": "architecture", "commands": "command", "request_plugins": "request plugin", "drafters": "drafter",
    "tool_parsers": "tool parser", "reasoning_parsers": "reasoning parser", "grammars": "grammar engine",
    "checkpoints": "checkpoint reader", "weight_files": "weight file reader", "state_formats": "state format",
    "model_sources": "model source", "executors": "executor", "placements": "placement of experts",
    "worker_drafters": "worker drafter", "connectors": "connector", "quantizers": "quantizer", "launchers": "launcher",
    "checkpoint_views": "checkpoint view", "pooling_readers": "pooling reader", "pooling_parts": "part of pooling",
    "stage_parts": "part of stages", "adapter_readers": "adapter reader", "tokenizer_readers": "tokenizer reader",
    "chat_readers": "chat reader", "draft_policies": "draft policy", "step_limits": "step limit",
    "media_parts": "part of media", "adapters": "maker of adapters", "grammar_masks": "maker of masks",
    "weight_makers": "maker of weights", "engine_commands": "engine command", "old_spellings": "old spellings",
    "config_readers": "config reader", "cache_listeners": "cache listener",
}  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LazyImport:
    """One lazily imported name.

    Attributes:
        kind: what it is, a value of ``LAZY_IMPORT_FIELDS``.
        name: the name that users type or checkpoints carry.
        path: ``module:attribute``.
        package: name of the package that announced it.
        distribution: the distribution that brought that package.
    """

    kind: str
    name: str
    path: str
    package: str
    distribution: str

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            ArchitectureError: an architecture whose module fails to import or lacks the attribute.
            DescriptorError: the same for any other kind. Both carry the original cause.
        """
        prepare_torch_import()
        module, _, attribute = self.path.partition(":")
        error = ArchitectureError if self.kind == "architecture" else DescriptorError
        try:
            loaded = importlib.import_module(module)
        except EvenerError:
            raise
        except Exception as cause:
            raise error(
                f"{self.kind} {self.name!r} of {self.distribution} cannot be used: "
                f"importing {module} failed with {type(cause).__name__}: {cause}"
            ) from cause
        try:
            return functools.reduce(getattr, attribute.split("."), loaded)
        except AttributeError as cause:
            raise error(
                f"{self.kind} {self.name!r} of {self.distribution} points at {self.path!r}, "
                f"but {module} has no {attribute!r}; correct the descriptor of {self.package!r}"
            ) from cause


def prepare_torch_import() -> None:
    """Set two environment variables that torch reads when it is first imported; call this before.

    torch must not import every installed device extension by itself: the chosen backend imports its own, and an
    extension of another backend must not open a device. So an inherited value is overwritten.

    OpenMP threads must not spin while they wait. By default they spin for milliseconds, and so keep a core from the
    thread that they wait for when the machine has other work (measured with two other busy processes on 2 cores: a
    sampled step takes 930 ms instead of 100; alone 22 instead of 16).
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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
    """A package that cannot be used. ``step`` failed (``found`` or ``contracts``); ``error`` says why."""

    step: str
    error: PluginError


@dataclass(frozen=True, kw_only=True)
class Disabled(Origin):
    """A package that is switched off; nothing of it was imported. ``reason`` names the environment variable."""

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

    def lazy_imports(self, kind: str) -> dict[str, LazyImport]:
        """What the usable packages announce of one kind (``architecture``, ``command``, ``request plugin``,
        ``checkpoint reader``, ``model source``), by name; nothing is imported until ``LazyImport.load``."""
        field = next(field for field, called in LAZY_IMPORT_FIELDS.items() if called == kind)
        return {
            name: LazyImport(kind=kind, name=name, path=path, package=package.name, distribution=package.distribution)
            for package in self.packages
            for name, path in getattr(package.descriptor, field).items()
        }

    def need(self, kind: str, name: str, what: str, install: str, error: type[EvenerError] = ConfigError) -> Any:
        """Import and return the entry called ``name``; with "", the first by name.

        Raises:
            ConfigError, or another ``error``: there is none. It says that ``what`` needs it, and what to ``install``.
        """
        found = self.lazy_imports(kind)
        name = name or min(found, default="")
        if name not in found:
            raise error(f"{what} needs a package that is not installed; type: pip install {install}")
        return found[name].load()

    def answers(self, kind: str, *asked: Any) -> Iterator[Any]:
        """What the functions of one kind return for ``asked``, in order. None means that a function does not apply, and
        is left out."""
        found = (each.load()(*asked) for each in self.lazy_imports(kind).values())
        return (answer for answer in found if answer is not None)

    def commands(self) -> dict[str, LazyImport]:
        """CLI commands of every usable package."""
        return self.lazy_imports("command")


@dataclass(frozen=True)
class Provided(Generic[T]):
    """A delivered object (a kernel, a state provider, an op schema, …): ``value``, and where it came from."""

    value: T
    package: str
    distribution: str
    version: str

    @property
    def label(self) -> str:
        """``package/name``, as the manifest shows it; ``value`` has a ``name``."""
        return f"{self.package}/{cast(Any, self.value).name}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a user may type for it: its name, its package, or both."""
        return cast(Any, self.value).name, self.package, self.label
