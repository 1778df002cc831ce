"""Calls of torch_npu's kernels. Each one is checked first, for what the vendor's own shape inference lets pass.

The kernels are ``torch.ops.npu``, which ``import torch_npu`` registers. Parameters are passed by keyword where the
schema has keywords, because their order changes between versions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.errors import EngineError

#: Tokens of a page. The vendor's attention takes multiples of 128 only.
PAGE = 128
#: The vendor's compressed causal mask has this many rows and columns, whatever the lengths are.
MASK = 2048
_HALVES = (torch.float16, torch.bfloat16)
_CAUSAL, _BAND = 3, 4
#: The vendor's number of the format FRACTAL_NZ.
_FRACTAL_NZ = 29
PROLOG = "npu_mla_prolog_v3"
#: What it takes, by CANN's page on aclnnMlaPrologV3WeightNz: hidden sizes, rank of queries, rank of latents, parts of a
#: head that are not rotated and that are, numbers of heads.
LATENT_SIZES = (6144, 7168, 7680), 1536, 512, 128, 64, (1, 2, 4, 8, 16, 32, 64, 128)


def _require(fact: bool, kernel: str, message: str) -> None:
    if not fact:
        raise EngineError(f"{kernel}: {message}; report it to the authors of evener-backend-ascend")


def causal_mask(device: torch.device) -> torch.Tensor:
    """int8 [2048, 2048], 1 where a key is after the query."""
    return torch.ones(MASK, MASK, dtype=torch.int8, device=device).triu_(1)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """x […, H] and gamma [H] of one dtype."""
    _require(gamma.shape == x.shape[-1:], "npu_rms_norm", f"gamma {list(gamma.shape)} for rows of {x.shape[-1]}")
    _require(gamma.dtype == x.dtype, "npu_rms_norm", f"gamma is {gamma.dtype}, x is {x.dtype}")
    y: torch.Tensor = torch.ops.npu.npu_rms_norm(x.contiguous(), gamma, eps)[0]
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, sum), all of one dtype."""
    same = x.dtype == residual.dtype == gamma.dtype and x.shape == residual.shape
    _require(same, "npu_add_rms_norm", f"{x.dtype} {list(x.shape)} and {residual.dtype} {list(residual.shape)}")
    _require(gamma.shape == x.shape[-1:], "npu_add_rms_norm", f"gamma {list(gamma.shape)} for rows of {x.shape[-1]}")
    y, _, total = torch.ops.npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), gamma, eps)
    return y, total


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row, times the second half."""
    _require(x.shape[-1] % 2 == 0, "npu_swiglu", f"rows of {x.shape[-1]} elements have no halves")
    y: torch.Tensor = torch.ops.npu.npu_swiglu(x.contiguous(), -1)
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D] turned by cos and sin [T, D], all of one dtype."""
    tokens, heads, size = x.shape
    _require(cos.shape == sin.shape == (tokens, size), "npu_rotary_mul", f"angles {list(cos.shape)}, x {list(x.shape)}")
    _require(cos.dtype == sin.dtype == x.dtype, "npu_rotary_mul", f"angles are {cos.dtype}, x is {x.dtype}")
    _require(size % 2 == 0 and size < 896 and heads < 1000, "npu_rotary_mul", f"{heads} heads of {size} elements")
    y: torch.Tensor = torch.ops.npu.npu_rotary_mul(
        x.contiguous()[None], cos[None, :, None], sin[None, :, None], "interleave" if interleaved else "half"
    )
    return y[0]


def gate_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, *, top: int, groups: int, top_groups: int, group_best: int,
    sigmoid: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(weights [T, top], ids int32 [T, top]). Weights of sigmoid scores sum to ``scale``."""
    name = "npu_moe_gating_top_k"
    _require(bias is None or (bias.dtype == logits.dtype and bias.shape == logits.shape[1:]), name, "bias and logits")
    _require(group_best in (1, 2), name, f"the best {group_best} of a group")
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits, top, bias=bias, k_group=top_groups, group_count=groups, group_select_mode=group_best - 1, renorm=0,
        norm_type=int(sigmoid), out_flag=False, routed_scaling_factor=scale, eps=1e-20,
    )  # fmt: skip
    return weights, ids


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of x [P, K], of which ``counts[e]`` belong to matrix e, times weight [E, K, N]. Rows after the last group
    are not computed."""
    name = "npu_grouped_matmul"
    _require(x.dtype == weight.dtype, name, f"x is {x.dtype}, the weight is {weight.dtype}")
    _require(x.shape[1] == weight.shape[1], name, f"x {list(x.shape)}, weight {list(weight.shape)}")
    _require(counts.dtype == torch.int64 and counts.shape == weight.shape[:1], name, f"counts {counts.dtype}")
    _require(counts.shape[0] > 1, name, "one group")
    found = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    y: torch.Tensor = found[0]
    return y


def grouped_int8_matmul(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor,
    fixed: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows of x [P, K] as int8 with one scale a row, of which ``counts[e]`` belong to matrix e, times int8 codes
    [E, K, N] with float32 scales [E, N]; in the dtype of x. ``fixed``: as for ``int8_matmul``."""
    name = "npu_grouped_matmul"
    _require_grouped_int8(x, codes, scales, counts, name)
    quantized, rows = _int8_rows(x, fixed)
    # The vendor takes scales of bfloat16 for a result of bfloat16, and of float32 for one of float16.
    scale = scales.to(torch.bfloat16) if x.dtype == torch.bfloat16 else scales
    found = torch.ops.npu.npu_grouped_matmul(
        [quantized], [codes], scale=[scale], per_token_scale=[rows], group_list=counts, split_item=2, group_type=0,
        group_list_type=1, output_dtype=x.dtype,
    )  # fmt: skip
    y: torch.Tensor = found[0]
    return y


def grouped_int8_weight_matmul(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The same with x as it is; scales are rounded to its dtype."""
    name = "npu_grouped_matmul"
    _require_grouped_int8(x, codes, scales, counts, name)
    scale = scales.to(x.dtype)
    found = torch.ops.npu.npu_grouped_matmul(
        [x.contiguous()], [codes], antiquant_scale=[scale], antiquant_offset=[torch.zeros_like(scale)],
        group_list=counts, split_item=2, group_type=0, group_list_type=1,
    )  # fmt: skip
    y: torch.Tensor = found[0]
    return y


def _require_grouped_int8(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, name: str
) -> None:
    _require(x.dtype in _HALVES and x.dim() == 2, name, f"x is {x.dtype} {list(x.shape)}")
    same = codes.dtype == torch.int8 and codes.dim() == 3 and codes.shape[1] == x.shape[1]
    _require(same, name, f"x {list(x.shape)}, {codes.dtype} codes {list(codes.shape)}")
    right = scales.dtype == torch.float32 and scales.shape == (codes.shape[0], codes.shape[2])
    _require(right, name, f"scales {list(scales.shape)}")
    _require(counts.dtype == torch.int64 and counts.shape == codes.shape[:1], name, f"counts {counts.dtype}")
    _require(counts.shape[0] > 1, name, "one group")
    _require(max(codes.shape[1:]) < 65536, name, f"codes {list(codes.shape)}")


def int8_matmul(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None,
    fixed: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, K] as int8, times int8 codes [K, N] with float32 scales [N]; in the dtype of x. ``fixed``: float32 [3], the
    scale of all tokens, its reciprocal, and -127 times it; None: each token has a scale of its own."""
    _require_int8(x, codes, scales, bias, "npu_quant_matmul")
    quantized, tokens = _int8_rows(x, fixed)
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        quantized, codes, scales, pertoken_scale=tokens, bias=None if bias is None else bias.float(),
        output_dtype=x.dtype,
    )  # fmt: skip
    return y


def _int8_rows(x: torch.Tensor, fixed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as int8, and a float32 scale for each row [T]."""
    if fixed is None:
        quantized, rows = torch.ops.npu.npu_dynamic_quant(x.contiguous())
        return quantized, rows
    _require(fixed.dtype == torch.float32 and fixed.shape == (3,), "npu_quantize", f"fixed {list(fixed.shape)}")
    # The vendor takes scales in the dtype of what they multiply, and the reciprocal in bfloat16 would move large
    # elements by a quarter of a step. Division by the scale (``div_mode``) has the same rule, by an older operator.
    wide = x.float().contiguous()
    # The vendor cuts off at -128 (`ascend_quant_v2` in CANN's ops-nn has no other range), and evener's op at -127. With
    # a scale a token nothing is cut off: it is the largest magnitude divided by 127.
    torch.maximum(wide, fixed[2:], out=wide)
    codes = torch.ops.npu.npu_quantize(wide, fixed[1:2], None, torch.qint8, axis=-1, div_mode=False)
    # Without scales of tokens, a result of float16 needs the weight's scales in another form.
    return codes, fixed[:1].expand(x.shape[0]).contiguous()


def int8_weight_matmul(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, K] times int8 codes [K, N] with float32 scales [N], which are rounded to the dtype of x."""
    _require_int8(x, codes, scales, bias, "npu_weight_quant_batchmatmul")
    # The vendor takes a bias of float16 for float16, and of float32 for bfloat16.
    wide = None if bias is None else bias.to(torch.float16 if x.dtype == torch.float16 else torch.float32)
    y: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(x.contiguous(), codes, scales.to(x.dtype), bias=wide)
    return y


def _require_int8(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, name: str
) -> None:
    _require(x.dtype in _HALVES and x.dim() == 2, name, f"x is {x.dtype} {list(x.shape)}")
    _require(codes.dtype == torch.int8 and x.shape[1] == codes.shape[0], name, f"x {list(x.shape)}, {codes.dtype} "
             f"codes {list(codes.shape)}")  # fmt: skip
    _require(scales.dtype == torch.float32 and scales.shape == codes.shape[1:], name, f"scales {list(scales.shape)}")
    _require(bias is None or bias.shape == scales.shape, name, "the bias")
    _require(max(codes.shape) < 65536, name, f"codes {list(codes.shape)}")


def write_pages(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write key [T, heads, D] and value [T, heads, E] to keys [pages, 128, heads, D] and values [pages, 128, heads, E].
    Mutates the pages."""
    name = "npu_scatter_pa_kv_cache"
    dtypes = {key.dtype, value.dtype, keys.dtype, values.dtype}
    _require(len(dtypes) == 1, name, f"several dtypes: {sorted(map(str, dtypes))}")
    _require(key.shape[:2] == value.shape[:2] == (slots.shape[0], keys.shape[2]), name, f"keys {list(key.shape)}")
    _require(keys.shape[1] == values.shape[1] == PAGE, name, f"pages of {keys.shape[1]} tokens, not {PAGE}")
    _require(key.shape[2] == keys.shape[3] and value.shape[2] == values.shape[3], name, f"key {list(key.shape)}")
    _require(keys.is_contiguous() and values.is_contiguous(), name, "pages with gaps")
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), keys, values, slots.contiguous(), cache_mode="Norm"
    )


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, kv_heads: int, scale: float,
    table: torch.Tensor, query_ends: Sequence[int], kv_lens: Sequence[int], mask: torch.Tensor,
    window: int | None = None, query_rope: torch.Tensor | None = None, key_rope: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of query [T, heads, D] over pages [pages, 128, kv_heads * D]; returns [T, heads, D].

    Args:
        table: int32 [R, C], pages of each request.
        query_ends: for each request the number of its last token in the step, plus one.
        kv_lens: tokens of each request.
        mask: ``causal_mask``.
        window: tokens that a query sees, with itself; None: all.
        query_rope, key_rope: of latent attention, [T, heads, rope] and [pages, 128, rope].
    """
    name = "npu_fused_infer_attention_score"
    tokens, heads, size = query.shape
    _require(query.dtype in _HALVES and keys.dtype == values.dtype == query.dtype, name, f"{query.dtype}, {keys.dtype}")
    _require(keys.shape == values.shape, name, f"keys {list(keys.shape)}, values {list(values.shape)}")
    _require(keys.shape[1:] == (PAGE, kv_heads * size), name, f"pages {list(keys.shape)} for {kv_heads} x {size}")
    _require(heads % kv_heads == 0 and (kv_heads == 1 or heads // kv_heads <= 64), name, f"{heads} on {kv_heads} heads")
    _require(table.dtype == torch.int32 and table.dim() == 2, name, f"the block table is {table.dtype}")
    _require(mask.shape == (MASK, MASK) and mask.dtype in (torch.int8, torch.uint8, torch.bool), name, "the mask")
    _require(len(query_ends) == len(kv_lens) == table.shape[0], name, f"{len(kv_lens)} lengths")
    _require(not query_ends or query_ends[-1] == tokens, name, f"{tokens} tokens, but queries end at {query_ends[-1:]}")
    longest = max(kv_lens, default=0)
    _require(-(-longest // PAGE) <= table.shape[1], name, f"{longest} tokens in {table.shape[1]} columns")
    _require(keys.is_contiguous() and values.is_contiguous(), name, "pages with gaps")
    if query_rope is not None:
        same = key_rope is not None and query_rope.dtype == key_rope.dtype == query.dtype
        _require(same and query_rope.shape[:2] == query.shape[:2], name, "the rotated parts")
        query_rope = query_rope.contiguous()
    found: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        query.contiguous(), keys, values, query_rope=query_rope, key_rope=key_rope, atten_mask=mask,
        actual_seq_lengths=list(query_ends), actual_seq_lengths_kv=list(kv_lens), block_table=table.contiguous(),
        num_heads=heads, num_key_value_heads=kv_heads, scale=scale, input_layout="TND", block_size=PAGE,
        sparse_mode=_CAUSAL if window is None else _BAND,
        pre_tokens=2147483647 if window is None else window - 1, next_tokens=2147483647 if window is None else 0,
    )[0]  # fmt: skip
    return found


def latent_prolog(
    x: torch.Tensor, down_q: torch.Tensor, up_q: torch.Tensor, up_keys: torch.Tensor, down_kv: torch.Tensor,
    q_gamma: torch.Tensor, kv_gamma: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries in latent space [T, heads, 512], their rotated parts [T, heads, 64], latents [T, 512] and rotated keys
    [T, 64] of x [T, hidden], all bfloat16. Pairs of neighbours are rotated; the first elements of all pairs come before
    the second ones.

    Args:
        down_q, up_q, down_kv: [hidden, 1536], [1536, heads * 192] and [hidden, 576], in FRACTAL_NZ.
        up_keys: [heads, 128, 512].
        q_gamma, kv_gamma: weights of the norms of the queries' latents and of the latents.
        sin, cos: [T, 64], each angle in both halves.
    """
    hidden, q_rank, rank, nope, rope, known_heads = LATENT_SIZES
    tokens, width, heads = x.shape[0], x.shape[-1], up_keys.shape[0]
    given = x, down_q, up_q, up_keys, down_kv, q_gamma, kv_gamma, sin, cos
    wanted = ((tokens, width), (width, q_rank), (q_rank, heads * (nope + rope)), (heads, nope, rank),
              (width, rank + rope), (q_rank,), (rank,), (tokens, rope), (tokens, rope))  # fmt: skip
    _require(all(each.dtype == torch.bfloat16 for each in given), PROLOG, "not all of its inputs are bfloat16")
    for each, shape in zip(given, wanted, strict=True):
        _require(each.shape == shape, PROLOG, f"{list(each.shape)} where it takes {list(shape)}")
    _require(width in hidden and heads in known_heads, PROLOG, f"{heads} heads over {width} elements")
    _require(up_keys.is_contiguous(), PROLOG, "the keys' projection has gaps")
    # It writes to pages; these are the step's own, of the smallest size that it takes.
    latents, keys = (x.new_empty(-(-tokens // 16), 16, 1, size) for size in (rank, rope))
    query, turned, *_ = torch.ops.npu.npu_mla_prolog_v3(
        x.contiguous(), down_q, up_q, up_keys, down_kv, q_gamma, kv_gamma, sin, cos, latents, keys,
        cache_index=torch.arange(tokens, device=x.device), rmsnorm_epsilon_cq=eps, rmsnorm_epsilon_ckv=eps,
        cache_mode="PA_BSND",
    )  # fmt: skip
    return query, turned, latents.view(-1, rank)[:tokens], keys.view(-1, rope)[:tokens]


def has_transformer_library() -> bool:
    """Whether torch_npu found Huawei's transformer library and registered its kernels, ``torch.ops.atb``."""
    return hasattr(torch.ops.atb, "_npu_paged_attention") and hasattr(torch.ops.atb, "_npu_reshape_and_cache")


def as_fractal_nz(x: torch.Tensor) -> torch.Tensor:
    """A matrix in the format FRACTAL_NZ; or pages [blocks, pieces, 128, 16] marked as such, in which their bytes lie
    already. Without the process's permission for such formats the vendor's op does nothing."""
    known = x.shape[2:] == (PAGE, 16) if x.dim() == 4 else x.dim() == 2 and not any(n % 16 for n in x.shape)
    _require(known and x.is_contiguous(), "npu_format_cast", f"a tensor of {list(x.shape)}")
    marked: torch.Tensor = torch.ops.npu.npu_format_cast(x, _FRACTAL_NZ)
    return marked


def write_blocked(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write key and value [T, heads, D], float16, to keys and values [pages, heads * D / 16, 128, 16]. Mutates the
    pages."""
    name = "_npu_reshape_and_cache"
    dtypes = {key.dtype, value.dtype, keys.dtype, values.dtype}
    _require(dtypes == {torch.float16}, name, f"not float16: {sorted(map(str, dtypes))}")
    _require(key.shape == value.shape and key.shape[0] == slots.shape[0], name, f"keys {list(key.shape)}")
    pieces = key.shape[1] * key.shape[2] // 16
    same = keys.shape[1:] == values.shape[1:] == (pieces, PAGE, 16) and key.shape[2] % 16 == 0
    _require(same, name, f"pages {list(keys.shape)} for {list(key.shape)}")
    _require(slots.dtype == torch.int32, name, f"slots are {slots.dtype}")
    torch.ops.atb._npu_reshape_and_cache(key.contiguous(), value.contiguous(), keys, values, slots.contiguous())


def blocked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, kv_heads: int, scale: float, table: torch.Tensor,
    kv_lens: torch.Tensor, longest: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of one new token for each request, query [R, heads, D] in float16, over pages as ``write_blocked``
    takes; returns [R, heads, D].

    Args:
        table: int32 [R, C], pages of each request.
        kv_lens: int32 [R], tokens of each request; on the device, as the vendor's own engine passes them on this chip.
        longest: the largest of them.
    """
    name = "_npu_paged_attention"
    requests, heads, size = query.shape
    _require(query.dtype == keys.dtype == values.dtype == torch.float16, name, f"{query.dtype}, {keys.dtype}")
    pages = kv_heads * size // 16, PAGE, 16
    _require(keys.shape[1:] == values.shape[1:] == pages, name, f"pages {list(keys.shape)} for {kv_heads} x {size}")
    _require(heads % kv_heads == 0, name, f"{heads} on {kv_heads} heads")
    _require(table.dtype == kv_lens.dtype == torch.int32, name, f"the table is {table.dtype}, lengths {kv_lens.dtype}")
    _require(table.shape[0] == kv_lens.shape[0] == requests, name, f"{kv_lens.shape[0]} lengths for {requests} queries")
    _require(-(-longest // PAGE) <= table.shape[1], name, f"{longest} tokens in {table.shape[1]} columns")
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    torch.ops.atb._npu_paged_attention(
        query.contiguous(), keys, values, kv_heads, heads, scale, table.contiguous(), kv_lens.contiguous(), out
    )
    return out
