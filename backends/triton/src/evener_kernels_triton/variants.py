"""Launch sizes other than those of the rules in ``tuning``, for ``evener tune`` to time: a few changes of a rule's
sizes for one product, and for a composite every combination of the changes of its products."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from evener.contracts.ops import OpCall, Variant
from evener.contracts.quant import WeightPart
from evener_kernels_triton.packed import segments_of
from evener_kernels_triton.packed_token import reads_token, token_sizes
from evener_kernels_triton.stored import WORD
from evener_kernels_triton.tuning import MAX_SUMMED_TOKENS, Grouped, Product, Tuning

#: Up to this many tokens our products are tried where the rule uses the library's.
_MAX_TRIED_TOKENS = 128


def combined(parts: Mapping[str, Iterable[Variant]]) -> Sequence[Variant]:
    """Changes of every part, each alone and combined with those of the others."""
    each = [[{}, *({f"{part}.{key}": value for key, value in one.items()} for one in of)] for part, of in parts.items()]
    return [dict(ChainMap(*of)) for of in itertools.product(*each) if any(of)]


def products(tuning: Tuning, call: OpCall, rows: int, columns: int, halves: int = 1) -> Sequence[Variant]:
    """Variants of ``few_tokens_linear`` for a weight [rows, columns] at the tokens of ``call``; ``halves``: 2 with an
    activation, which halves the rows of one token."""
    tokens, element = call.bucket.high, _size(call)
    if tokens == 1:
        return _single_token(tuning, rows // halves, columns, halves)
    if tokens > _MAX_TRIED_TOKENS:
        return []
    own, usual = tuning.skinny(tokens, rows, columns, element), tuning.uses_own_product(tokens, rows)
    tried = [] if usual else [{"own": 1}]
    for n, k, warps in ((own.n, own.k, 8), (own.n // 2, own.k, 4), (own.n * 2, own.k, 4), (own.n, own.k // 2, 4)):
        stages = _stages(tuning, (max(own.m, 16) + n) * k * element, 8)
        if 16 <= n <= 128 and k >= 32 and stages is not None:
            tried.append({"n": n, "k": k, "warps": warps, "stages": stages})
    if 2 * own.splits * own.k <= columns:
        tried.append({"splits": 2 * own.splits})
    if own.splits > 1:
        tried.append({"splits": own.splits // 2})
    return [*tried, {"library": 1}] if usual else [{"own": 1, **one} for one in tried]


def _single_token(tuning: Tuning, rows: int, columns: int, halves: int, stored: bool = False) -> Sequence[Variant]:
    p = tuning.persistent_gemv(rows, columns, halves, stored)
    return gemv_variants(tuning.gemv(rows, columns, halves, stored)) if p is None else persistent_gemv_variants(p)


def stored_products(
    tuning: Tuning, call: OpCall, rows: int, columns: int, most: int, halves: int = 1
) -> Sequence[Variant]:
    """As ``products``, for weights of one byte an element; ``most`` as in ``Tuning.stored``."""
    tokens, element = call.bucket.high, _size(call)
    if tokens == 1 and columns % WORD == 0:
        return _single_token(tuning, rows // halves, columns, halves, True)
    if not tuning.uses_own_product(tokens, rows, stored=True):
        return []
    own, tried = tuning.stored(tokens, rows, columns, element, most), list[Variant]()
    for n, k in ((own.n, own.k), (own.n // 2, own.k), (own.n * 2, own.k), (own.n, own.k // 2), (own.n, own.k * 2)):
        for stages in (3, 5):
            sizes = (own.m * element + n) * k * stages <= tuning.shared - 1024 and 16 <= n <= 128 and 32 <= k <= 256
            if sizes and (n, k, stages) != (own.n, own.k, own.stages):
                tried.append({"n": n, "k": k, "stages": stages})
    if 4 * own.splits * own.k <= columns:
        tried.append({"splits": 2 * own.splits})
    return [*tried, {"splits": own.splits // 2}] if own.splits > 1 else tried


def rounded_products(tuning: Tuning, call: OpCall, rows: int, columns: int) -> Sequence[Variant]:
    """As ``products``, for weights and activations of one byte an element."""
    tokens = call.bucket.high
    own, tried = tuning.rounded(tokens, rows, columns, 128), list[Variant]()
    for m, n, warps in ((own.m, 64, 4), (own.m, 128, 4), (own.m, 128, 8), (2 * own.m, own.n, 8), (own.m // 2, 128, 4)):
        stages = _stages(tuning, (m + n) * own.k, 4)
        same = (m, n, warps) == (own.m, own.n, own.warps)
        if stages is not None and not same and 16 <= m <= min(256, max(16, 2 * tokens)):
            tried.append({"m": m, "n": n, "warps": warps, "stages": stages})
    if 2 * own.splits * own.k <= columns:
        tried.append({"splits": 2 * own.splits})
    return [*tried, {"splits": own.splits // 2}] if own.splits > 1 else tried


def packed_products(tuning: Tuning, call: OpCall, parts: Sequence[WeightPart], halves: int = 1) -> Sequence[Variant]:
    """As ``products``, for packed weights of these parts; the same changes for each segment."""
    tokens, columns = call.bucket.high, parts[0].columns
    rows, form = max(segments_of(parts), key=lambda of: of[0])
    if tokens == 1 and reads_token(tuning, form, rows // halves, columns, _size(call), halves):
        one = token_sizes(tuning, form, rows // halves, columns, halves)
        return [] if one is None else persistent_gemv_variants(one)
    if not tuning.uses_own_product(tokens, rows, stored=True):
        return []
    own = tuning.packed(tokens, rows, columns, form.columns, _size(call))
    tried: list[Variant] = []
    for n, warps, stages in ((16, 1, 3), (32, 1, 3), (32, 2, 2), (32, 2, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3),
                             (128, 4, 2)):  # fmt: skip
        if (n, warps, stages) != (own.n, own.warps, own.stages) and (own.m <= MAX_SUMMED_TOKENS or n >= 32):
            tried.append({"n": n, "warps": warps, "stages": stages})
    if 2 * own.splits <= form.spans(columns):
        tried.append({"splits": 2 * own.splits})
    return [*tried, {"splits": own.splits // 2}] if own.splits > 1 else tried


def persistent_gemv_variants(p: Product) -> Sequence[Variant]:
    """Variants for one token and rows in one tile: programs, rows at a time, warps."""
    other = 4 if p.warps == 8 else 8
    tried: list[Variant] = [{"n": 2 * p.n}, {"m": 2 * p.m}, {"warps": other}, {"n": 2 * p.n, "warps": 2 * other}]
    if p.m > 1:
        tried.append({"m": p.m // 2})
    if p.n > 1:
        tried.append({"n": p.n // 2})
    return tried


def gemv_variants(p: Product) -> Sequence[Variant]:
    """Variants for one token and rows in several tiles: rows and columns at a time, warps."""
    tried = [{"n": 2 * p.n}, {"warps": p.warps // 2}, {"n": 2 * p.n, "warps": min(16, 2 * p.warps)}]
    return [*tried, {"k": p.k // 2}] if p.k >= 64 else tried


def single_token_down_variants(p: Product) -> Sequence[Variant]:
    """Variants of ``down`` of one token's experts: also as large a tile of another shape, and tiles under way."""
    return [*gemv_variants(p), {"n": p.n // 2, "k": 2 * p.k}, {"n": p.n // 2}, {"stages": 4 - p.stages}]


def grouped_variants(
    tuning: Tuning, call: OpCall, matrices: int, rows: int, columns: int, halves: int
) -> Sequence[Variant]:
    """Variants of a stack's product, ``top`` matrices for each token."""
    element = _size(call)
    own = tuning.grouped(call.bucket.high * call.static["top"], matrices, rows, columns, halves, element)
    tried: list[Grouped] = []
    for n, k, warps in ((own.n, own.k, 12 - own.warps), (own.n // 2, own.k, 4), (own.n * 2, own.k, 8),
                        (own.n, own.k // 2, own.warps), (own.n, own.k * 2, own.warps)):  # fmt: skip
        stages = _stages(tuning, (own.m + halves * n) * k * element, 4)
        if 16 <= n <= 256 // halves and 32 <= k <= 128 and stages is not None:
            tried.append(replace(own, n=n, k=k, warps=warps, stages=stages))
    return [{"n": p.n, "k": p.k, "warps": p.warps, "stages": p.stages} for p in tried]


def rounded_grouped_variants(
    tuning: Tuning, call: OpCall, matrices: int, rows: int, columns: int, halves: int
) -> Sequence[Variant]:
    """The same of rounded activations."""
    own = tuning.rounded_grouped(call.bucket.high * call.static["top"], matrices, rows, columns, halves, 128)
    tried: list[Variant] = []
    for m, n, warps in ((own.m, own.n // 2, 4), (own.m, own.n * 2, own.warps), (own.m, own.n, 12 - own.warps),
                        (own.m // 2, own.n, 4), (own.m * 2, own.n, own.warps)):  # fmt: skip
        stages = _stages(tuning, (m + halves * n) * own.k, 4)
        if 16 <= m <= 128 and 32 <= n <= 128 and stages is not None:
            tried.append({"m": m, "n": n, "warps": warps, "stages": stages})
    return tried


def _stages(tuning: Tuning, tile: int, most: int) -> int | None:
    """Number of stages: tiles of these bytes that fit into shared memory, at most ``most``; None for fewer than two."""
    fit = min(most, (tuning.shared - 1024) // tile)
    return fit if fit >= 2 else None


def _size(call: OpCall) -> int:
    dtype: torch.dtype = getattr(torch, call.static["dtype"])
    return dtype.itemsize
