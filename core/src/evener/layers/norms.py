"""Norms as layers declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.builder import Builder
from evener.layers.declared import Weight


def norm_weight(build: Builder, prefix: str, name: str | None, size: int, common: Mapping[str, Any]) -> Weight | None:
    """The weight of norm ``name`` of layer ``prefix``, None for no name; ``common`` holds the norms' offset."""
    if name is None:
        return None
    return build.weight(f"{prefix}.{name}.weight", size, dummy="zeros" if common["offset"] else "ones")
