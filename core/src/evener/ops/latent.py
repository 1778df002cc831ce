"""Latent attention as composites: what is kept of a token is one short vector for all heads (DeepSeek-AI 2024, MLA).

There are two ways to attend. *Expansion* makes every head's keys and values from the latents again: few operations a
query, right for many queries. *Absorption* brings the queries into latent space instead and the result out of it: few
bytes a query, right for one. Both give the same numbers but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from evener.contracts.ops import OpFunction, Use
from evener.contracts.state import StepParts
from evener.ops.composites import linear_static
from evener.ops.norms import Static, first_norm
from evener.ops.ranks import summed

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight

#: Tokens of a context whose keys and values are expanded at a time.
_PIECE = 512
#: Of the norms inside, whatever the other norms have.
INNER_EPS = 1e-6


class LatentWeights(NamedTuple):
    """What a ``latent_attention_block`` needs beside its inputs; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before.
        down: makes the queries (or their latent, if ``q`` makes queries from it), the latent and the rotated key.
        kv_norm: [rank], of the norm of the latent.
        kv_b: [heads * (nope_dim + value_dim), rank], makes keys and values of latents.
        o: the output projection, [hidden, heads * value_dim].
        cos_sin: float32 [positions, rope_dim], as ``rotary`` takes it.
        q: [heads * (nope_dim + rope_dim), q_rank], makes queries of their latent.
        q_norm: [q_rank], of the norm of the queries' latent.
        down_bias: [rows of down].
        o_bias: [hidden]; of ranks one has it.
        heads: ``kv_b`` as it is, not packed.
        q_product: [heads * (rank + rope_dim), …], a product that absorption can do without.
        o_product: [hidden, heads * rank], another one.
    """

    norm: torch.Tensor
    down: PackedWeight
    kv_norm: torch.Tensor
    kv_b: PackedWeight
    o: PackedWeight
    cos_sin: torch.Tensor
    q: PackedWeight | None = None
    q_norm: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    heads: torch.Tensor | None = None
    q_product: torch.Tensor | None = None
    o_product: torch.Tensor | None = None


class IndexWeights(NamedTuple):
    """What an ``index_block`` needs beside its inputs.

    Attributes:
        q: [heads * head_dim, q_rank], makes queries of the queries' latent.
        k: [head_dim, hidden], makes the key.
        weights: [heads, hidden], makes the heads' weights.
        k_norm: [head_dim], of the layer norm of the key.
        k_norm_bias: [head_dim], its bias.
        cos_sin: float32 [positions, rope_dim], as ``rotary`` takes it.
    """

    q: PackedWeight
    k: PackedWeight
    weights: PackedWeight
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    cos_sin: torch.Tensor


def _parts(meta: Any, tokens: int) -> Iterator[tuple[Any, int, int, bool]]:
    """Metadata, first and last token of each part, and whether its requests add one token each."""
    if not isinstance(meta, StepParts):
        yield meta, 0, tokens, tokens == 1
        return
    if meta.single is not None:
        yield meta.single, 0, meta.tokens, True
    if meta.longer is not None:
        yield meta.longer, meta.tokens, tokens, False


def _inner_norm(static: Static, width: int) -> dict[str, Any]:
    return {"hidden": width, "dtype": static["dtype"], "eps": INNER_EPS, "offset": 0.0}


def latent_attend(static: Static, use: Use) -> OpFunction:
    heads, nope, value_dim, rank = (static[k] for k in ("heads", "nope_dim", "value_dim", "rank"))
    mode, sparse, dtype = static["absorb"], static["sparse"], static["dtype"]
    attend = use("state.attend_chosen" if sparse else "state.attend", state=static["state"])
    pieces = use("state.pieces", state=static["state"])
    common = {"heads": heads, "dtype": dtype, "any_rows": True}
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
            assert matrices is not None, "a sparse layer absorbs"
            return absorbed(query, matrices, views, meta, chosen)
        found = []
        for part, first, stop, single in _parts(meta, query.shape[0]):
            rows = query[first:stop]
            if single and mode != "none":
                assert matrices is not None, "absorption has its matrices"
                found.append(absorbed(rows, matrices, views, part))
            else:
                found.append(expanded(rows, kv_b, views, part))
        return found[0] if len(found) == 1 else torch.cat(found)

    return run


def index_block(static: Static, use: Use) -> OpFunction:
    heads, dim, dtype = static["heads"], static["head_dim"], static["dtype"]
    query, key, weigh = (use("linear", **linear_static(static[k])) for k in ("q", "k", "weights"))
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


def latent_attention_block(static: Static, use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return summed("latent_attention_block", static, use, weights=3)
    heads, nope, rope, rank, dtype = (static[k] for k in ("heads", "nope_dim", "rope_dim", "rank", "dtype"))
    q_rank, hidden = static["q_rank"], static["hidden"]
    begin = first_norm(static, use)
    down, leave = (use("linear", **linear_static(static[name])) for name in ("down", "o"))
    kv_norm = use("rms_norm", **_inner_norm(static, rank))
    q_norm = use("rms_norm", **_inner_norm(static, q_rank)) if q_rank else None
    queries = use("linear", **linear_static(static["q"])) if q_rank else None
    rotate = use("rotary", head_dim=rope, rotary_dim=rope, interleaved=static["interleaved"], dtype=dtype)
    write, direct = (use(f"state.{name}", state=static["state"]) for name in ("write", "attend"))
    inner = ("state", "heads", "nope_dim", "value_dim", "rank", "dtype", "kv_b", "absorb", "sparse")
    attend = use("latent_attend", **{k: static[k] for k in inner})
    products = {"heads": 1, "transposed": False, "dtype": dtype}
    wide = heads * (rank + rope)
    q_product = use("head_linear", columns=q_rank or hidden, rows=wide, **products)
    o_product = use("head_linear", columns=heads * rank, rows=hidden, **products)
    index = use("index_block", **static["index"]) if static["sparse"] else None
    width = q_rank or heads * (nope + rope)

    def enter(
        query: torch.Tensor, cut: int, latent: torch.Tensor, key: torch.Tensor, positions: torch.Tensor,
        w: LatentWeights, views: Any, meta: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Rotate, and write the state; returns the queries."""
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
        return leave(found.flatten(1), w.o, w.o_bias), residual

    return run
