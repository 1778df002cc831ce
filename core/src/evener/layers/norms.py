"""Norms as layers declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers.builder import Builder
from evener.layers.declared import Weight


def norm_common(build: Builder, hidden: int, eps: float, offset: float, kind: str) -> dict[str, Any]:
    """What all blocks of a layer are told: the stream's width and its norms."""
    return {"hidden": hidden, "dtype": build.dtype, "eps": eps, "offset": offset, "norm": kind}


def norm_weight(build: Builder, prefix: str, name: str | None, size: int, common: Mapping[str, Any]) -> Weight | None:
    """The weight of norm ``name`` of layer ``prefix``, None for no name; ``common``: as made above."""
    return None if name is None else declare_norm(build, f"{prefix}.{name}", size, common)


def declare_norm(
    build: Builder, name: str, size: int, common: Mapping[str, Any], dtype: str | None = None
) -> Weight | None:
    """The weight of norm ``name``, for a biased layer norm with the bias behind it; None for a bare one."""
    kind, sources = common["norm"], [f"{name}.weight"]
    if kind == "bare_layer":
        return None
    if kind == "biased_layer":
        sources, size = [*sources, f"{name}.bias"], 2 * size
    dummy, dtype = "zeros" if common["offset"] else "ones", dtype or (None if kind == "rms" else "float32")
    return build.weight(sources[0], size, dummy=dummy, sources=sources, dtype=dtype)
