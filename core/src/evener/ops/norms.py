"""The norms that blocks are made of, of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evener.contracts.ops import OpFunction, Use

if TYPE_CHECKING:
    import torch

Static = Mapping[str, Any]


def norm_static(static: Static, hidden: int | None = None) -> dict[str, Any]:
    """Static parameters of a norm over ``hidden`` (default: the block's own width)."""
    return {"hidden": hidden or static["hidden"], **{k: static[k] for k in ("dtype", "eps", "offset")}}


def any_norm(static: Static, use: Use, hidden: int | None = None) -> OpFunction:
    """The block's kind of norm, over ``hidden`` (default: the block's own width). A layer norm is computed in float32,
    in which its weights are; they are one tensor, the bias behind the weight."""
    if static["norm"] == "rms":
        return use("rms_norm", **norm_static(static, hidden))
    size = hidden or static["hidden"]
    norm = use("layer_norm", hidden=size, dtype="float32", eps=static["eps"])

    def run(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        parts = (None, None) if weight is None else (*weight.split(size), None)[:2]
        normed: torch.Tensor = norm(x.float(), *parts)
        return normed.to(x.dtype)

    return run


def add_norm(static: Static, use: Use) -> OpFunction:
    """Of the stream ``x + residual``, the normed rows and the sum in float32."""
    if not static.get("pre_norm", True):
        return lambda x, residual, _: ((x + residual).to(x.dtype), x + residual)
    if static["norm"] == "rms":
        return use("add_rms_norm", **norm_static(static))
    norm = any_norm(static, use)

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual  # the wider type wins
        return norm(total, weight).to(x.dtype), total

    return run


def first_norm(static: Static, use: Use) -> OpFunction:
    """``add_norm`` where there may be no residual yet, as most blocks begin."""
    add = add_norm(static, use)
    norm: OpFunction = any_norm(static, use) if static.get("pre_norm", True) else lambda x, _: x

    def run(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> Any:
        return (norm(x, weight), x.float()) if residual is None else add(x, residual, weight)

    return run


def rms_norm_among_ranks(static: Static, use: Use, own: int) -> OpFunction:
    """rms_norm of rows of which every rank holds ``own`` columns, with its part of the weight. Columns that several
    ranks hold count once for each of these, all as often, so the mean is the same."""
    ranks, eps, offset = static["qk_norm_ranks"], static["eps"], static["offset"]
    add = use("all_reduce", communicator=ranks, hidden=1, dtype="float32")

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        total = add(wide.square().sum(-1, keepdim=True))
        normed: torch.Tensor = wide * (total / (own * ranks.size) + eps).rsqrt() * (weight.float() + offset)
        return normed.to(x.dtype)

    return run


def head_norm(static: Static, use: Use, heads: int) -> OpFunction:
    """Queries or keys [T, heads, dim] and their norm's weight to what they are after it."""
    dim, over = static["head_dim"], static["qk_norm_over"]
    if over == "head":
        return any_norm(static, use, dim)
    if over == "all":
        norm = (rms_norm_among_ranks if static["qk_norm_ranks"] else any_norm)(static, use, heads * dim)
        return lambda x, weight: norm(x.flatten(1), weight).unflatten(-1, (heads, dim))
    each = any_norm({**static, "norm": "bare_layer"}, use, dim)
    return lambda x, weight: (each(x.float(), None) * weight.view(heads, dim)).to(x.dtype)
