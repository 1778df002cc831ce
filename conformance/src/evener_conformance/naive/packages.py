"""What installed packages add to the naive engine: read from entry points, without the plugin manager. A package's
module is imported only when something is needed that only it has."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Architecture
from evener.contracts.descriptor import Descriptor
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import OpSchema
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec
from evener.errors import ArchitectureError, UnknownNameError
from evener_conformance.reference.device import HostDevice

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

_GROUPS = ("evener.plugins", "evener.kernels", "evener.backends")


def _descriptors(*groups: str) -> Iterator[Descriptor]:
    folders = tuple((folder, _modified(folder)) for folder in sys.path)
    for group in groups:
        yield from (entry.load() for entry in _entries(group, folders))


# Metadata of every distribution is read for this. A package that is installed later changes its folder's time.
@lru_cache(maxsize=len(_GROUPS))
def _entries(group: str, _folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    from importlib_metadata import entry_points

    return tuple(entry_points(group=group))


def _modified(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def find_architecture(name: str) -> type[Architecture]:
    """The class that an installed package registered under ``name``.

    Raises:
        UnknownNameError: nobody registered it.
    """
    known: dict[str, str] = {}
    for descriptor in _descriptors("evener.plugins"):
        known.update(descriptor.architectures)
    if name not in known:
        raise UnknownNameError("architecture", name, known)
    module, _, attribute = known[name].partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def find_schema(op: str) -> OpSchema | None:
    """The op that an installed package adds under this name."""
    for descriptor in _descriptors(*_GROUPS):
        if op in descriptor.op_schemas:
            return next((schema for schema in _hook(descriptor, "evener_op_schemas")() if schema.name == op), None)
    return None


def find_provider(spec: StateSpec, attention: AttentionSpec, given: tuple[StateProvider, ...] = ()) -> StateProvider:
    """The provider for a kind of state that the naive engine does not define. Searched in this order: ``given``,
    providers of packages that announce the kind, providers of other plugins.

    Raises:
        ArchitectureError: there is none; with the reasons.
    """
    refused: list[str] = []
    for provider in (*given, *_providers(spec.kind)):
        if spec.kind in provider.kinds:
            reason = provider.supports(spec, attention, DeviceCapabilities(host_memory=True))
            if reason is None:
                return provider
            refused.append(f"{provider.name}: {reason}")
    detail = f" ({'; '.join(refused)})" if refused else ""
    raise ArchitectureError(
        f"the naive engine has no state of kind {spec.kind!r} that {attention.algorithm!r} reads, and no installed "
        f"package serves it{detail}; install the one that announces it in `states`, or give "
        "NaiveModel(…, providers=[…])"
    )


def _providers(kind: str) -> Iterator[StateProvider]:
    plugins = [id(d) for d in _descriptors("evener.plugins")]
    for descriptor in sorted(_descriptors(*_GROUPS), key=lambda d: kind not in d.state_kinds):
        # The modules of other packages may need hardware to be imported.
        if descriptor.states and (kind in descriptor.state_kinds or id(descriptor) in plugins):
            options = {name: option.default for name, option in descriptor.options.items()}
            yield from _hook(descriptor, "evener_state_providers")(HostDevice(0), options)


def _hook(descriptor: Descriptor, name: str) -> Any:
    assert descriptor.module is not None, "a package that announces what a hook delivers has a module"
    return getattr(importlib.import_module(descriptor.module), name)
