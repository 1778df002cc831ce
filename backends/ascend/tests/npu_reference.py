"""torch_npu's kernels as plain torch, on the CPU key of its ops: our reading of the vendor's documentation.

For tests only. ``schemas_*.txt`` are the schemas of torch_npu's releases, read from its binaries; where torch_npu
itself is not imported, the ops are defined from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

_HERE = Path(__file__).parent
RELEASES = ("2.11", "2.13")


def recorded_schemas(release: str) -> dict[str, str]:
    """The schema of each op that the package calls, by the op's name."""
    lines = (_HERE / f"schemas_{release}.txt").read_text().splitlines()
    return {line.partition("(")[0]: line for line in lines}


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * inverse * gamma.float()).to(x.dtype), inverse


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


def rotary_mul(
    x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: torch.Tensor | None = None
) -> torch.Tensor:
    if rotary_mode == "half":
        a, b = x.chunk(2, -1)
        crossed = torch.cat((-b, a), -1)
    else:
        crossed = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * r1 + crossed * r2


def moe_gating_top_k(
    x: torch.Tensor, k: int, *, bias: torch.Tensor | None = None, k_group: int = 1, group_count: int = 1,
    group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    norm = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    wanted = norm if bias is None else norm + bias
    if group_count > 1:
        grouped = wanted.unflatten(-1, (group_count, -1))
        rank = grouped.topk(2, -1).values.sum(-1) if group_select_mode else grouped.amax(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(k_group, -1).indices, True)
        wanted = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = norm.gather(1, ids)
    if norm_type:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), norm


def grouped_matmul(
    x: list[torch.Tensor], weight: list[torch.Tensor], *, group_list: torch.Tensor, split_item: int = 0,
    group_type: int | None = None, group_list_type: int = 0, scale: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None, antiquant_scale: list[torch.Tensor] | None = None,
    antiquant_offset: list[torch.Tensor] | None = None, output_dtype: int | None = None, **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    assert (split_item, group_type, group_list_type) == (2, 0, 1), "other forms are not simulated"
    (rows,), (matrices,) = x, weight
    wanted = rows.dtype if output_dtype is None else _OUTPUTS[int(output_dtype)]
    if antiquant_scale is not None:
        assert matrices.dtype == torch.int8 and antiquant_offset is not None
        assert antiquant_scale[0].dtype == antiquant_offset[0].dtype == rows.dtype
        matrices = (matrices.float() + antiquant_offset[0].float()[:, None]) * antiquant_scale[0].float()[:, None]
    if scale is not None:
        assert matrices.dtype == rows.dtype == torch.int8 and per_token_scale is not None
        assert scale[0].dtype == (torch.bfloat16 if wanted == torch.bfloat16 else torch.float32)
    # NaN where the kernel computes nothing, so that a reader of these rows is found.
    out = torch.full((rows.shape[0], matrices.shape[2]), float("nan"), dtype=wanted)
    start = 0
    for index, (matrix, count) in enumerate(zip(matrices, group_list.tolist(), strict=True)):
        stop = start + count
        if scale is None or per_token_scale is None:
            out[start:stop] = (rows[start:stop].to(matrix.dtype) @ matrix).to(wanted)
        else:
            y = (rows[start:stop].double() @ matrix.double()).float() * scale[0][index].float()
            out[start:stop] = (y * per_token_scale[0][start:stop, None]).to(wanted)
        start = stop
    return [out]


#: torch's numbers of dtypes, as the vendor's kernels take them.
_OUTPUTS = {5: torch.float16, 15: torch.bfloat16}
_QINT8 = 12


def dynamic_quant(input: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert input.dtype in (torch.float16, torch.bfloat16)
    scales = input.float().abs().amax(-1) / 127
    # A row of zeros has a scale of 0.
    codes = torch.round(input.float() / scales.clamp_min(1e-30)[:, None])
    return codes.to(torch.int8), scales


def quantize(
    input: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, dtype: int, axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:  # fmt: skip
    assert (zero_points, axis, div_mode) == (None, -1, False), "other forms are not simulated"
    assert int(dtype) == _QINT8 and scales.dtype == input.dtype and scales.shape in ((1,), input.shape[-1:])
    return torch.round(input * scales).clamp(-128, 127).to(torch.int8)


def quant_matmul(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *, pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, output_dtype: int | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    assert pertoken_scale is not None and x1.dtype == x2.dtype == torch.int8, "other forms are not simulated"
    # Exact, as int32 sums are.
    y = (x1.double() @ x2.double()).float() * scale * pertoken_scale[:, None]
    return (y if bias is None else y + bias).to(_OUTPUTS[int(output_dtype or 0)])


def weight_quant_batchmatmul(
    x: torch.Tensor, weight: torch.Tensor, antiquant_scale: torch.Tensor, antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None, quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, antiquant_group_size: int = 0, inner_precise: int = 0, **_: Any,
) -> torch.Tensor:  # fmt: skip
    assert weight.dtype == torch.int8 and antiquant_scale.dtype == x.dtype and not antiquant_group_size
    y = x.float() @ (weight.float() * antiquant_scale.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def scatter_pa_kv_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *, cache_mode: str | None = "PA_NZ", **_: Any,
) -> None:  # fmt: skip
    assert cache_mode == "Norm", "other layouts are not simulated"
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slot_mapping.long()] = rows


def fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int], actual_seq_lengths_kv: list[int], block_table: torch.Tensor,
    query_rope: torch.Tensor | None = None, key_rope: torch.Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, block_size: int = 0, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert input_layout == "TND" and sparse_mode in (3, 4), "other forms are not simulated"
    assert atten_mask is not None and bool(atten_mask[0, 1]) and not bool(atten_mask[1, 0]), "a causal mask"
    out, start = torch.empty_like(query), 0
    ends = zip(actual_seq_lengths, actual_seq_lengths_kv, strict=True)
    for row, (end, length) in enumerate(ends):
        pages = block_table[row, : -(-length // block_size)].long()

        def read(cache: torch.Tensor, pages: torch.Tensor = pages, length: int = length) -> torch.Tensor:
            return cache[pages].flatten(0, 1)[:length].unflatten(-1, (num_key_value_heads, -1)).float()

        q, k, v = query[start:end].float(), read(key), read(value)
        if query_rope is not None and key_rope is not None:
            q, k = torch.cat((q, query_rope[start:end].float()), -1), torch.cat((k, read(key_rope)), -1)
        # Position of the query minus that of the key.
        behind = torch.arange(length - (end - start), length)[:, None] - torch.arange(length)[None]
        hidden = behind < 0
        if sparse_mode == 4:
            hidden = (behind < -next_tokens) | (behind > pre_tokens)
        spread = num_heads // num_key_value_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(spread, 1)) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(spread, 1)).to(query.dtype)
        start = end
    return out, torch.empty(0)


def fused_infer_attention_score_out(*args: Any, workspace: Any, out: list[torch.Tensor], **kwargs: Any) -> Any:
    del workspace
    out[0].copy_(fused_infer_attention_score(*args, **kwargs)[0])
    return tuple(out)


def format_cast(input: torch.Tensor, acl_format: int, **_: Any) -> torch.Tensor:
    assert acl_format == 29 and input.shape[-1] % 16 == 0, "other formats are not simulated"
    return input


def mla_prolog_v3(
    token_x: torch.Tensor, weight_dq: torch.Tensor, weight_uq_qr: torch.Tensor, weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor, rmsnorm_gamma_cq: torch.Tensor, rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor, rope_cos: torch.Tensor, kv_cache: torch.Tensor, kr_cache: torch.Tensor, *,
    cache_index: torch.Tensor, rmsnorm_epsilon_cq: float = 1e-5, rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND", **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """By CANN's page on aclnnMlaPrologV3WeightNz, with formula 15 of its design for the rotation: results are rounded
    to bfloat16 after each step."""
    assert cache_mode == "PA_BSND" and cache_index.dtype == torch.int64, "other forms are not simulated"
    heads, nope, rank = weight_uk.shape

    def norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, gamma, eps)[0]

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Products of bfloat16 take torch minutes on a processor without instructions for them.
        return (x.float() @ weight.float()).to(x.dtype)

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., 0::2].float(), x[..., 1::2].float()
        turned = torch.cat((first, second), -1) * rope_cos.float()[:, None]
        return (turned + torch.cat((-second, first), -1) * rope_sin.float()[:, None]).to(x.dtype)

    query = product(norm(product(token_x, weight_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq), weight_uq_qr)
    content, turned = query.unflatten(-1, (heads, -1)).split([nope, rope_sin.shape[1]], -1)
    inside = product(content.transpose(0, 1), weight_uk).transpose(0, 1)
    latent, key = product(token_x, weight_dkv_kr).split([rank, rope_sin.shape[1]], -1)
    latent = norm(latent, rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
    for cache, rows in ((kv_cache, latent), (kr_cache, turn(key[:, None])[:, 0])):
        cache.view(-1, cache.shape[-1])[cache_index] = rows
    nothing = torch.zeros(1)
    return inside.contiguous(), turn(turned), nothing, nothing.to(weight_uq_qr.dtype), nothing.clone()


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:  # fmt: skip
    page, place = slot_indices.long() // key_cache.shape[2], slot_indices.long() % key_cache.shape[2]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[page, :, place] = rows.flatten(1).unflatten(1, (-1, 16))


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, num_kv_heads: int, num_heads: int,
    scale_value: float, block_table: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor, *,
    workspace: torch.Tensor | None = None,
) -> None:  # fmt: skip
    del workspace

    def tokens(cache: torch.Tensor) -> torch.Tensor:
        return cache.transpose(1, 2).flatten(2)

    lengths = context_lens.tolist()
    found, _ = fused_infer_attention_score(
        query, tokens(key_cache), tokens(value_cache), atten_mask=torch.tensor([[0, 1], [0, 0]]),
        actual_seq_lengths=list(range(1, len(lengths) + 1)), actual_seq_lengths_kv=lengths, block_table=block_table,
        num_heads=num_heads, num_key_value_heads=num_kv_heads, scale=scale_value, input_layout="TND", sparse_mode=3,
        block_size=key_cache.shape[2],
    )  # fmt: skip
    out.copy_(found)


#: Forms of an op that torch_npu's graphs put in its place. No schema of theirs is recorded.
IN_GRAPHS: dict[str, Callable[..., Any]] = {
    "npu_fused_infer_attention_score.out": fused_infer_attention_score_out,
    "_npu_fused_infer_attention_score_infer_output": lambda query, value, **_: (
        torch.empty_like(query), torch.empty(0),
    ),
    "_npu_fused_infer_attention_score_get_max_workspace": lambda *_, **__: torch.empty(64, dtype=torch.uint8),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm, "npu_add_rms_norm": add_rms_norm, "npu_swiglu": swiglu, "npu_rotary_mul": rotary_mul,
    "npu_moe_gating_top_k": moe_gating_top_k, "npu_grouped_matmul": grouped_matmul,
    "npu_dynamic_quant": dynamic_quant, "npu_quantize": quantize,
    "npu_quant_matmul": quant_matmul,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul, "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_fused_infer_attention_score": fused_infer_attention_score, "npu_format_cast": format_cast,
    "npu_mla_prolog_v3": mla_prolog_v3,
    "atb::_npu_reshape_and_cache": reshape_and_cache, "atb::_npu_paged_attention": paged_attention,
}  # fmt: skip


class Registered:
    """Libraries whose functions are there until ``close``."""

    def __init__(self) -> None:
        self._libraries: dict[str, torch.library.Library] = {}

    def of(self, namespace: str, kind: str) -> torch.library.Library:
        """The library of a namespace."""
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, kind)
        return self._libraries[namespace]

    def close(self) -> None:
        """Take the functions away."""
        for library in self._libraries.values():
            library._destroy()


def register(release: str | None) -> Registered:
    """Put the functions on the CPU key; the result must be kept alive.

    Args:
        release: define the ops by this release's schemas; None: torch_npu has defined them.
    """
    registered = Registered()
    for name, function in {**({} if release else IN_GRAPHS), **FUNCTIONS}.items():
        namespace, _, op = name.rpartition("::")
        library = registered.of(namespace or "npu", "FRAGMENT" if release else "IMPL")
        if release:
            library.define(recorded_schemas(release)[name].removeprefix("atb::"))
        library.impl(op, function, "CPU")
    return registered
