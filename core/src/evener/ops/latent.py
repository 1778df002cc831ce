"""References of multi-head latent attention: the state has one short vector per token, shared by all heads
(DeepSeek-V2, DeepSeek-AI 2024).

There are two ways to compute it. *Expansion* computes the keys and values of every head from the latents: few
operations per query, so it is used for many queries. *Absorption* projects the queries into latent space and the result
back: it reads few bytes, so it is used for one query per request. The results differ only by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evener.contracts.ops import OpFunction, Use
from evener.contracts.state import SplitMetadata
from evener.contracts.statics import IndexStatic, LatentAttendStatic, LatentStatic, select
from evener.contracts.weights import IndexWeights, LatentWeights
from evener.ops.composites import linear_static
from evener.ops.norms import first_norm
from evener.ops.ranks import all_reduce_block

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight

#: Tokens of a context whose keys and values are expanded at a time.
_PIECE = 512
#: Epsilon of the inner norms (of latents and of the index), whatever the block's own is.
INNER_EPS = 1e-6


def _parts(meta: Any, tokens: int) -> Iterator[tuple[Any, int, int, bool]]:
    """For each part: metadata, first token, end, and whether its requests add one token each."""
    if not isinstance(meta, SplitMetadata):
        yield meta, 0, tokens, tokens == 1
        return
    if meta.decode is not None:
        yield meta.decode, 0, meta.tokens, True
    if meta.prefill is not None:
        yield meta.prefill, meta.tokens, tokens, False


def _inner_norm(static: LatentStatic, width: int) -> dict[str, Any]:
    return {"hidden": width, "dtype": static["dtype"], "eps": INNER_EPS, "offset": 0.0}


def latent_attend(static: LatentAttendStatic, use: Use) -> OpFunction:
    heads, nope, value_dim, rank = static["heads"], static["nope_dim"], static["value_dim"], static["rank"]
    mode, sparse, dtype = static["absorb"], static["sparse"], static["dtype"]
    attend = use("state.attend_chosen" if sparse else "state.attend", state=static["state"])
    pieces = use("state.pieces", state=static["state"])
    common: dict[str, Any] = {"heads": heads, "dtype": dtype, "any_rows": True}
    lower = use("head_linear", columns=nope, rows=rank, transposed=True, **common)
    lift = use("head_linear", columns=rank, rows=value_dim, transposed=False, **common)
    expand = use("linear", any_rows=True, **linear_static(static["kv_b"]))
    scale = static["state"].attention.scale
    piecewise = use("partial_attention", scale=scale, **common)

    def absorbed(query: torch.Tensor, kv_b: torch.Tensor, views: Any, meta: Any, *chosen: torch.Tensor) -> torch.Tensor:
        import torch

        matrices = kv_b.view(heads, nope + value_dim, rank)
        inside = torch.cat((lower(query[..., :nope], matrices[:, :nope]), query[..., nope:]), dim=-1)
        return lift(attend(views, meta, inside, *chosen), matrices[:, nope:])  # type: ignore[no-any-return]

    def expanded(query: torch.Tensor, kv_b: PackedWeight, views: Any, meta: Any) -> torch.Tensor:
        import torch

        out = query.new_zeros(query.shape[0], heads, value_dim, dtype=torch.float32)
        total = out.new_full(out.shape[:2], float("-inf"))
        for piece in pieces(views, meta, _PIECE):
            latent, rope = (t.to(query.dtype) for t in piece.tensors)
            keys, values = expand(latent, kv_b, None).unflatten(-1, (heads, -1)).split([nope, value_dim], dim=-1)
            keys = torch.cat((keys, rope[:, None].expand(-1, heads, -1)), dim=-1)
            rows = slice(piece.first, piece.stop)
            found, weight = piecewise(query[rows], keys, values, piece.offset)
            both = torch.logaddexp(total[rows], weight)
            out[rows] = (
                out[rows] * torch.exp(total[rows] - both)[..., None] + found * torch.exp(weight - both)[..., None]
            )
            total[rows] = both
        return out.to(query.dtype)

    def run(
        query: torch.Tensor, kv_b: PackedWeight, matrices: torch.Tensor | None, views: Any, meta: Any,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        import torch

        if chosen is not None:
            assert matrices is not None, "a sparse layer has the matrices for absorption"
            return absorbed(query, matrices, views, meta, chosen)
        found = []
        for part, first, stop, single in _parts(meta, query.shape[0]):
            rows = query[first:stop]
            if single and mode != "none":
                assert matrices is not None, "a layer with absorption has its matrices"
                found.append(absorbed(rows, matrices, views, part))
            else:
                found.append(expanded(rows, kv_b, views, part))
        return found[0] if len(found) == 1 else torch.cat(found)

    return run


def index_block(static: IndexStatic, use: Use) -> OpFunction:
    heads, dim, dtype = static["heads"], static["head_dim"], static["dtype"]
    query, key, weigh = (use("linear", **linear_static(w)) for w in (static["q"], static["k"], static["weights"]))
    norm = use("layer_norm", hidden=dim, dtype=dtype, eps=INNER_EPS)
    rotate = use("rotary", head_dim=dim, rotary_dim=static["rope_dim"], interleaved=False, dtype=dtype)
    write, select = (use(f"state.{name}", state=static["state"]) for name in ("write", "select"))
    factor = heads**-0.5 * dim**-0.5

    def run(
        latent: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, w: IndexWeights, views: Any, meta: Any
    ) -> torch.Tensor:
        k = norm(key(x, w.k, None), w.k_norm, w.k_norm_bias)
        q, k = rotate(positions, query(latent, w.q, None).unflatten(-1, (heads, dim)), k[:, None], w.cos_sin)
        write(views, meta, k[:, 0])
        return select(views, meta, q, weigh(x, w.weights, None).float() * factor)  # type: ignore[no-any-return]

    return run


def latent_attention_block(static: LatentStatic, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return all_reduce_block("latent_attention_block", static, use, weights=3)
    heads, nope, rope, rank = static["heads"], static["nope_dim"], static["rope_dim"], static["rank"]
    q_rank, hidden, dtype = static["q_rank"], static["hidden"], static["dtype"]
    begin = first_norm(static, use)
    down, out_proj = (use("linear", **linear_static(weight)) for weight in (static["down"], static["o"]))
    kv_norm = use("rms_norm", **_inner_norm(static, rank))
    q_norm = use("rms_norm", **_inner_norm(static, q_rank)) if q_rank else None
    queries = use("linear", **linear_static(static["q"])) if static["q"] is not None else None
    rotate = use("rotary", head_dim=rope, rotary_dim=rope, interleaved=static["interleaved"], dtype=dtype)
    write, direct = (use(f"state.{name}", state=static["state"]) for name in ("write", "attend"))
    attend = use("latent_attend", **select(static, LatentAttendStatic))
    products: dict[str, Any] = {"heads": 1, "transposed": False, "dtype": dtype}
    wide = heads * (rank + rope)
    q_product = use("head_linear", columns=q_rank or hidden, rows=wide, **products)
    o_product = use("head_linear", columns=heads * rank, rows=hidden, **products)
    index = use("index_block", **static["index"]) if static["index"] is not None else None
    width = q_rank or heads * (nope + rope)

    def enter(
        query: torch.Tensor, cut: int, latent: torch.Tensor, key: torch.Tensor, positions: torch.Tensor,
        w: LatentWeights, views: Any, meta: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Apply rotary, write the state, and return the queries."""
        import torch

        query = query.unflatten(-1, (heads, -1))
        turned, key = rotate(positions, query[..., cut:], key[:, None], w.cos_sin)
        for part, first, stop, _ in _parts(meta, query.shape[0]):
            write(views, part, latent[first:stop], key[first:stop, 0])
        return torch.cat((query[..., :cut], turned), dim=-1)

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: LatentWeights, views: Any,
        meta: Any, index_weights: IndexWeights | None = None, index_views: Any = None, index_meta: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        x, residual = begin(x, residual, w.norm)
        query, latent, key = down(x, w.down, w.down_bias).split([width, rank, rope], dim=-1)
        latent = kv_norm(latent, w.kv_norm)
        if q_norm is not None:
            query = q_norm(query, w.q_norm)
        chosen = index(query, x, positions, index_weights, index_views, index_meta) if index is not None else None
        parts = list(_parts(meta, x.shape[0]))
        if w.q_product is not None and w.o_product is not None and len(parts) == 1 and parts[0][3]:
            source = query if q_rank else x
            made = q_product(source[:, None], w.q_product[None])[:, 0]
            query = enter(made, rank, latent, key, positions, w, views, meta)
            found = direct(views, parts[0][0], query)
            x = o_product(found.flatten(1)[:, None], w.o_product[None])[:, 0]
            return (x if w.o_bias is None else x + w.o_bias), residual
        if queries is not None:
            query = queries(query, w.q, None)
        query = enter(query, nope, latent, key, positions, w, views, meta)
        found = attend(query, w.kv_b, w.heads, views, meta, chosen)
        return out_proj(found.flatten(1), w.o, w.o_bias), residual

    return run
