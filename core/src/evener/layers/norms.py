"""How layers declare their norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.contracts.declared import Table, Weight
from evener.contracts.quant import DTYPE_BYTES
from evener.contracts.sizes import Size, local_size
from evener.contracts.statics import NormStatic
from evener.layers.builder import Builder

if TYPE_CHECKING:
    import torch


def norm_common(build: Builder, hidden: int, eps: float, offset: float, kind: str) -> NormStatic:
    """The static parameters that all blocks of a layer share: the width of the residual stream, and the norms."""
    return {"hidden": hidden, "dtype": build.dtype, "eps": eps, "offset": offset, "norm": kind}


def norm_weight(build: Builder, prefix: str, name: str | None, size: int, common: NormStatic) -> Weight | None:
    """The weight of norm ``name`` in layer ``prefix``; None if there is no name."""
    return None if name is None else declare_norm(build, f"{prefix}.{name}", size, common)


def declare_norm(build: Builder, name: str, size: Size, common: NormStatic, dtype: str | None = None) -> Weight | None:
    """The weight [size] of norm ``name``. A biased layer norm's bias follows its weight, in one tensor [2 * size]; a
    bare layer norm has no weight, and the result is None. If ``size`` is a Span, this rank holds its part."""
    kind, sources = common["norm"], [f"{name}.weight"]
    if kind == "bare_layer":
        return None
    if kind == "biased_layer":
        sources, size = [*sources, f"{name}.bias"], 2 * local_size(size)
    dummy, dtype = "zeros" if common["offset"] else "ones", dtype or (None if kind == "rms" else "float32")
    return build.weight(sources[0], size, dummy=dummy, sources=sources, dtype=dtype)


def ones_norm_weight(build: Builder, size: int, common: NormStatic) -> Table:
    """The weight [size] for an RMS norm without weights in the checkpoint: with ``offset`` added it is all ones."""
    value = 1.0 - common["offset"]

    def make(device: torch.device) -> torch.Tensor:
        import torch

        return torch.full((size,), value, dtype=getattr(torch, build.dtype), device=device)

    return build.table(("unit norm", size, value), int(size * DTYPE_BYTES[build.dtype]), make)
