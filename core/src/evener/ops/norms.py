"""Norms of any kind, as the references of blocks use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.contracts.ops import OpFunction, Static, Use

if TYPE_CHECKING:
    import torch


def norm_static(static: Static, hidden: int | None = None) -> dict[str, Any]:
    """Static parameters of ``rms_norm`` over ``hidden`` columns (default: the block's own width)."""
    return {"hidden": hidden or static["hidden"], **{k: static[k] for k in ("dtype", "eps", "offset")}}


def any_norm(static: Static, use: Use, hidden: int | None = None) -> OpFunction:
    """The block's kind of norm, over ``hidden`` columns (default: the block's own width). A layer norm has float32
    weights and is computed in float32; its weight and bias are one tensor, the weight first. ``offset`` is added to the
    weight of either kind."""
    if static["norm"] == "rms":
        return use("rms_norm", **norm_static(static, hidden))
    size, offset = hidden or static["hidden"], static["offset"]
    norm = use("layer_norm", hidden=size, dtype="float32", eps=static["eps"])

    def run(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        gain, bias = (None, None) if weight is None else (*weight.split(size), None)[:2]
        normed: torch.Tensor = norm(x.float(), gain if gain is None or not offset else gain + offset, bias)
        return normed.to(x.dtype)

    return run


def add_norm(static: Static, use: Use) -> OpFunction:
    """Returns the normed rows of ``x + residual``, and this sum in float32."""
    if not static.get("pre_norm", True):
        return lambda x, residual, _: ((x + residual).to(x.dtype), x + residual)
    if static["norm"] == "rms":
        return use("add_rms_norm", **norm_static(static))
    norm = any_norm(static, use)

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual  # in the wider dtype of the two
        return norm(total, weight).to(x.dtype), total

    return run


def first_norm(static: Static, use: Use) -> OpFunction:
    """Like ``add_norm``, but ``residual`` may be None: in the first layer there is none yet."""
    add = add_norm(static, use)
    norm: OpFunction = any_norm(static, use) if static.get("pre_norm", True) else lambda x, _: x

    def run(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> Any:
        return (norm(x, weight), x.float()) if residual is None else add(x, residual, weight)

    return run


def rms_norm_among_ranks(static: Static, use: Use, own: int) -> OpFunction:
    """``rms_norm`` of rows that are split over ranks: every rank has ``own`` columns and the same part of the weight.
    If several ranks have the same columns, all columns are counted equally often, so the mean does not change."""
    ranks, eps, offset = static["qk_norm_ranks"], static["eps"], static["offset"]
    add = use("all_reduce", communicator=ranks, hidden=1, dtype="float32")

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        total = add(wide.square().sum(-1, keepdim=True))
        normed: torch.Tensor = wide * (total / (own * ranks.size) + eps).rsqrt() * (weight.float() + offset)
        return normed.to(x.dtype)

    return run


def head_norm(static: Static, use: Use, heads: int) -> OpFunction:
    """The norm of queries or keys [T, heads, dim]."""
    dim, over = static["head_dim"], static["qk_norm_over"]
    if over == "head":
        return any_norm(static, use, dim)
    if over == "all":
        norm = (rms_norm_among_ranks if static["qk_norm_ranks"] else any_norm)(static, use, heads * dim)
        return lambda x, weight: norm(x.flatten(1), weight).unflatten(-1, (heads, dim))
    each, offset = any_norm({**static, "norm": "bare_layer"}, use, dim), static["offset"]
    return lambda x, weight: (each(x.float(), None) * (weight.float() + offset).view(heads, dim)).to(x.dtype)
