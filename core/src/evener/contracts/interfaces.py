"""Which interface of ``evener.contracts.state`` a kind of state has. Core and the kit hold providers to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.contracts import state

#: The interface of each built-in kind of state.
INTERFACES: Mapping[str, type[Any]] = {
    **dict.fromkeys(("full", "window", "chunk"), state.AttentionProvider), "latent": state.LatentProvider,
    "index": state.IndexProvider, "recurrent": state.RecurrentProvider}  # fmt: skip


def required_interface(spec: state.StateSpec, attention: state.AttentionSpec) -> type[Any]:
    """The interface that a layer needs from its provider. For a kind that a package adds: ``StoredStateProvider``, or
    ``StateProvider`` if it keeps no tensors."""
    added = state.StoredStateProvider if spec.tensors else state.StateProvider
    sparse = spec.kind == "latent" and attention.top is not None
    return state.SparseLatentProvider if sparse else INTERFACES.get(spec.kind, added)
