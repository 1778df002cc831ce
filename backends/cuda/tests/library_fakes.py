"""The libraries' documented semantics in plain torch, with_signature_of their published signatures.

A call is bound to the signature in ``signatures.json`` first, so that a name which the library does not have fails as
it would there; what a stand-in does not compute must have been left out.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SIGNATURES: dict[str, dict[str, list[list[str]]]] = json.loads((Path(__file__).parent / "signatures.json").read_text())
_KINDS = {
    "needed": inspect.Parameter.POSITIONAL_OR_KEYWORD, "optional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "*": inspect.Parameter.VAR_POSITIONAL, "keyword": inspect.Parameter.KEYWORD_ONLY,
    "**": inspect.Parameter.VAR_KEYWORD,
}  # fmt: skip


def published(release: str, name: str) -> inspect.Signature:
    """The signature of a function in a release."""
    parameters = []
    for parameter, kind in SIGNATURES[release][name]:
        default = None if kind in ("optional", "keyword") else inspect.Parameter.empty
        parameters.append(inspect.Parameter(parameter, _KINDS[kind], default=default))
    return inspect.Signature(parameters)


def with_signature_of(release: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function behind the release's signature: it gets what was given, by name."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(**published(release, name).bind(*args, **kwargs).arguments)

        return call

    return wrap


def softmax_over(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left: int = -1, cap: float = 0.0
) -> torch.Tensor:
    """[n, heads, dim] over [m, kv_heads, dim], the last query beside the last key, ``left`` keys before its own."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(keys.shape[0] - query.shape[0], keys.shape[0])[:, None]
    to = torch.arange(keys.shape[0])
    hidden = (to > at) | ((to < at - left) if left >= 0 else to < 0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def gather(pages: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` tokens of a sequence; only the blocks that hold them are looked at."""
    return pages[blocks[: -(-length // pages.shape[1])].long()].flatten(0, 1)[:length]


def flash_attn(page: int = 256, release: str = "flash_attn-2.8.3.post2") -> ModuleType:
    """flash-attn 2: pages of a multiple of 256 tokens, int32 lengths and tables, narrow types."""
    module = ModuleType("flash_attn")

    def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, *ints: torch.Tensor) -> None:
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert k.shape[1] % page == 0 and k.shape[3] % 8 == 0 and k.shape[3] <= 256, "unsupported pages or heads"
        assert {t.stride(-1) for t in (q, k, v, table)} == {1}
        assert {t.dtype for t in (table, *ints)} == {torch.int32}

    @with_signature_of(release, "flash_attn_with_kvcache")
    def with_kvcache(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any, softmax_scale: float,
                     causal: bool, window_size: tuple[int, int], softcap: float) -> torch.Tensor:  # fmt: skip
        checked(q, k_cache, v_cache, block_table, cache_seqlens)
        assert causal and window_size[1] == (0 if window_size[0] >= 0 else -1)
        return torch.stack([
            softmax_over(q[row], gather(k_cache, blocks, n), gather(v_cache, blocks, n), softmax_scale, window_size[0],
                         softcap)
            for row, (blocks, n) in enumerate(zip(block_table, cache_seqlens.tolist(), strict=True))
        ])  # fmt: skip

    @with_signature_of(release, "flash_attn_varlen_func")
    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
               softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
               block_table: Any) -> torch.Tensor:  # fmt: skip
        checked(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
        counts, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert causal and max(counts) <= max_seqlen_q and max(lengths) <= max_seqlen_k
        out = torch.full_like(q, torch.nan)
        for row, (start, count, n) in enumerate(zip(cu_seqlens_q.tolist(), counts, lengths, strict=False)):
            keys, values = (gather(pages, block_table[row], n) for pages in (k, v))
            out[start : start + count] = softmax_over(
                q[start : start + count], keys, values, softmax_scale, window_size[0], softcap
            )
        return out

    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = with_kvcache, varlen  # type: ignore[attr-defined]
    return module


def flashinfer(release: str = "flashinfer_python-0.6.3") -> ModuleType:
    """FlashInfer: host index arrays, pages on the device, a plan that many runs use."""
    module, wrapper = ModuleType("flashinfer"), "BatchPrefillWithPagedKVCacheWrapper"

    class Wrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = published(release, f"{wrapper}.__init__").bind(*args, **kwargs).arguments
            assert given["kv_layout"] == "NHD" and given["float_workspace_buffer"].nbytes >= 128 << 20
            self.planned: dict[str, Any] = {}

        def plan(self, *args: Any, **kwargs: Any) -> None:
            p = published(release, f"{wrapper}.plan").bind(*args, **kwargs).arguments
            assert p["causal"] and p["num_qo_heads"] % p["num_kv_heads"] == 0 and p["head_dim_qk"] in (64, 128, 256)
            arrays = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            assert {p[name].dtype for name in arrays} == {torch.int32}
            assert len(p["qo_indptr"]) == len(p["paged_kv_indptr"]) == len(p["paged_kv_last_page_len"]) + 1
            assert bool(((p["paged_kv_last_page_len"] >= 1) & (p["paged_kv_last_page_len"] <= p["page_size"])).all())
            assert bool((p["paged_kv_indptr"].diff() > 0).all()) and bool((p["qo_indptr"].diff() > 0).all())
            assert int(p["paged_kv_indptr"][-1]) == len(p["paged_kv_indices"])
            self.planned = p

        def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            given, p = published(release, f"{wrapper}.run").bind(*args, **kwargs).arguments, self.planned
            q, (k, v) = given["q"], given["paged_kv_cache"]
            assert q.dtype == p["q_data_type"] and k.dtype == v.dtype == p["kv_data_type"] and q.is_contiguous()
            assert k.stride() == v.stride() and k.stride(-1) == 1, "keys and values have one stride"
            out = torch.full_like(q, torch.nan)
            ends, pages = p["qo_indptr"].tolist(), p["paged_kv_indptr"].tolist()
            for row, last in enumerate(p["paged_kv_last_page_len"].tolist()):
                blocks = p["paged_kv_indices"][pages[row] : pages[row + 1]]
                length = (len(blocks) - 1) * p["page_size"] + last
                mine = slice(ends[row], ends[row + 1])
                out[mine] = softmax_over(q[mine], gather(k, blocks, length), gather(v, blocks, length), p["sm_scale"],
                                         p["window_left"], p["logits_soft_cap"] or 0.0)  # fmt: skip
            return out

    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    return module


def flash_mla(release: str = "flash_mla-1.0.0.dev0") -> ModuleType:
    """FlashMLA: one length of queries a call, pages of 64 tokens; the schedule of the same lengths."""
    module = ModuleType("flash_mla")

    @with_signature_of(release, "get_mla_metadata")
    def get_mla_metadata(**given: Any) -> tuple[Any, Any]:
        return ("schedule", None if "args" in given else "splits")

    @with_signature_of(release, "flash_mla_with_kvcache")
    def with_kvcache(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int,
                     tile_scheduler_metadata: Any, num_splits: Any, softmax_scale: float,
                     causal: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert (tile_scheduler_metadata, num_splits) == get_mla_metadata(cache_seqlens, q.shape[1] * q.shape[2], 1)
        assert q.is_contiguous() and k_cache.shape[1:] == (64, 1, 576) and (head_dim_v, causal) == (512, True)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        out = []
        for row, n in enumerate(cache_seqlens.tolist()):
            keys = gather(k_cache, block_table[row], n)
            out.append(softmax_over(q[row], keys, keys[..., :head_dim_v], softmax_scale))
        return torch.stack(out), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, with_kvcache  # type: ignore[attr-defined]
    return module


def deep_gemm(release: str = "sgl_deep_gemm-0.2.5", tile: int = 128) -> ModuleType:
    """DeepGEMM: bfloat16, rows of 16 bytes; experts in tiles whose rows have one owner, or none from some row on."""
    module = ModuleType("deep_gemm")

    def checked(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.shape[-1] % 8 == 0

    @with_signature_of(release, "bf16_gemm_nt")
    def gemm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        checked(a, b, d)
        d.copy_(a.float() @ b.float().T)

    @with_signature_of(release, "m_grouped_bf16_gemm_nt_contiguous")
    def grouped(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouped_layout: torch.Tensor) -> None:
        checked(a, b, d)
        assert grouped_layout.dtype == torch.int32 and len(a) == len(d) == len(grouped_layout) and len(a) % tile == 0
        for first in range(0, len(a), tile):
            owners = grouped_layout[first : first + tile]
            real = int((owners >= 0).sum())
            assert bool((owners[:real] == owners[0]).all()), "a tile has one owner"
            assert bool((owners[real:] == -1).all()), "rows without an owner come last"
            if real:
                d[first : first + tile] = a[first : first + tile].float() @ b[int(owners[0])].float().T

    module.bf16_gemm_nt, module.m_grouped_bf16_gemm_nt_contiguous = gemm, grouped  # type: ignore[attr-defined]
    module.get_m_alignment_for_contiguous_layout = lambda: tile  # type: ignore[attr-defined]
    return module


def install(
    patch: pytest.MonkeyPatch, folder: Path, module: ModuleType | None, distribution: str, version: str
) -> None:
    """As pip leaves it: metadata on the path, and the module (which fails to import if None)."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    patch.syspath_prepend(folder)
    if module is not None:
        patch.setitem(sys.modules, module.__name__, module)
