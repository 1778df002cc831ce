"""Norms as layers declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evener.contracts.quant import DTYPE_BYTES
from evener.layers.builder import Builder
from evener.layers.declared import Size, Table, Weight, held

if TYPE_CHECKING:
    import torch


def norm_common(build: Builder, hidden: int, eps: float, offset: float, kind: str) -> dict[str, Any]:
    """What all blocks of a layer are told: the stream's width and its norms."""
    return {"hidden": hidden, "dtype": build.dtype, "eps": eps, "offset": offset, "norm": kind}


def norm_weight(build: Builder, prefix: str, name: str | None, size: int, common: Mapping[str, Any]) -> Weight | None:
    """The weight of norm ``name`` of layer ``prefix``, None for no name; ``common``: as made above."""
    return None if name is None else declare_norm(build, f"{prefix}.{name}", size, common)


def declare_norm(
    build: Builder, name: str, size: Size, common: Mapping[str, Any], dtype: str | None = None
) -> Weight | None:
    """The weight of norm ``name``, for a biased layer norm with the bias behind it; None for a bare one. Of a Span this
    rank holds its part."""
    kind, sources = common["norm"], [f"{name}.weight"]
    if kind == "bare_layer":
        return None
    if kind == "biased_layer":
        sources, size = [*sources, f"{name}.bias"], 2 * held(size)
    dummy, dtype = "zeros" if common["offset"] else "ones", dtype or (None if kind == "rms" else "float32")
    return build.weight(sources[0], size, dummy=dummy, sources=sources, dtype=dtype)


def unit_norm(build: Builder, size: int, common: Mapping[str, Any]) -> Table:
    """The weight of a root mean square norm that has none; ``common`` as in ``norm_weight``."""
    value = 1.0 - common["offset"]

    def make(device: torch.device) -> torch.Tensor:
        import torch

        return torch.full((size,), value, dtype=getattr(torch, build.dtype), device=device)

    return build.table(("unit norm", size, value), int(size * DTYPE_BYTES[build.dtype]), make)
