"""Products of rounded activations with weights of one byte an element, where the checkpoint allows it and the matrix
unit multiplies such elements (``contracts.storage.Rounding``).

Only for more tokens than a few: of those, reading the weights takes most of the time, and ``stored`` reads no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.quant import QuantFormat
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.rounded import (
    act_round_kernel,
    norm_round_kernel,
    round_long_rows_kernel,
    round_rows_kernel,
    rounded_kernel,
)
from evener_kernels_triton.rounded_few import (
    FewSizes,
    activated_sizes,
    few_sizes,
    few_sums,
    rounded_activated,
    rounded_few,
)
from evener_kernels_triton.scaled import HELD_TOKENS, scaled_product, scaled_refusal
from evener_kernels_triton.stored import STORED, Form, StoredMatrix, form_of, pieces
from evener_kernels_triton.tuning import Product, Tuning, memoized, power_of_two

#: Up to this many tokens, activations are used as they are, but with weights for ``rounded_few``, which round from two
#: tokens on (a layer of Qwen3-8B with 16 on an H200: 85.4 to 64.2 µs with blocks, 70.5 to 66.9 with rows). And the same
#: for experts, whose weights take longer to convert than to read: a step of Qwen3-30B-A3B with 16 requests took 11.06
#: ms on an H100, 9.62 with rounding, with 8 requests 8.19 and 7.06.
MAX_KEPT_TOKENS, MAX_KEPT_TOKENS_OF_EXPERTS = 16, 4
#: A program finds the scale of so many columns; rows are not longer if they have one scale.
MAX_ROUNDED_COLUMNS = 1 << 15
#: Up to this many tokens our products are about as fast as the library's: 4,096 x 4,096 with scales of rows, rounding
#: included, took 14.5 µs at 64 tokens, the library 15.3; at 128 tokens 38.2 and 15.6.
MAX_OWN_TOKENS = 64
#: The same where one scale is all tokens' and one all of the weight's: 64 tokens by 4,096 x 12,288 took 19.7 µs, the
#: library 16.2.
MAX_OWN_TOKENS_ONE_SCALE = 32
#: Rows of more columns that share a scale are read twice, so many columns at a time.
_CHUNK = 4096
#: Numbers that a program rounds, of a row with several scales.
_AT_A_TIME = 2048
#: Up to so many tokens, ``round_rows`` lets the next launch in before it waits: 1 µs less of a layer with 16 tokens and
#: scales of rows, nothing with blocks, and 1 to 3 more with 64.
EARLY_TOKENS = 32
#: Matrix units multiply so many columns of such elements at a time.
_LEAST_COLUMNS = 32
#: Tiles of tokens that programs take at the same time.
_TILES_AT_ONCE = 16


@dataclass(frozen=True)
class RoundedRows:
    """Activations as they are multiplied.

    Attributes:
        elements: float8_e4m3fn or int8 [held, columns]; rows after ``tokens`` are garbage.
        scales: float32 [groups, held], or [1] for all.
        group: columns that share a scale; 0: all, -1: so do all tokens.
        tokens: rows.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    group: int
    tokens: int


def rounds(tuning: Tuning, tokens: int, weight: LinearWeight) -> bool:
    """Whether products of up to ``tokens`` tokens with ``weight`` are of rounded activations."""
    if weight.layout != STORED.layout or not _fits(tuning, weight):
        return False
    if tokens <= (MAX_KEPT_TOKENS_OF_EXPERTS if weight.experts else MAX_KEPT_TOKENS):
        size = weight.rows, weight.columns, form_of(weight.parts), _group(weight)
        return not weight.experts and few_sizes(tuning, tokens, *size) is not None
    return _is_faster(tuning, tokens, weight)


def _is_faster(tuning: Tuning, tokens: int, weight: LinearWeight) -> bool:
    """Whether the products are faster than those of activations as they are, as measured on a GPU with 132 units.

    Those of stacks and the library's always are; ours with scales of rows but for weights of few rows at 65 to 128
    tokens (4,096 x 4,096: 38.2 µs, 22.2 as they are); ours with blocks up to 64 tokens (the same weight: 15.6 and
    16.8), and with many rows to 1,024 (24,576 x 4,096: 354 and 379; 2,396 and 2,228 at 8,192).
    """
    if weight.experts or tokens <= MAX_OWN_TOKENS or _by_library(tuning, tokens, weight):
        return True
    if form_of(weight.parts).wide or _group(weight) > 0:
        return weight.rows > weight.columns and tokens <= 1024
    return weight.rows > weight.columns or tokens > 128


def _group(weight: LinearWeight) -> int:
    """``RoundedRows.group`` of a weight in ``_fits``."""
    how = weight.parts[0].format.activation
    assert how is not None, "as in rounds"
    return 0 if how.group >= weight.columns else how.group


def _by_library(tuning: Tuning, tokens: int, weight: LinearWeight) -> bool:
    """Whether ``rounded_product`` takes the library's for a weight in ``_fits``, if there are no changes of sizes."""
    size = weight.rows, weight.columns, form_of(weight.parts), _group(weight)
    many = tokens > MAX_OWN_TOKENS and (weight.out or weight.dtype) == "bfloat16"
    return many and _has_library(tuning, *size)


@memoized
def _has_library(tuning: Tuning, rows: int, columns: int, form: Form, group: int) -> bool:
    """Whether torch has this product on the device."""
    return scaled_refusal(tuning, rows, columns, form, group) is None


def _fits(tuning: Tuning, weight: LinearWeight) -> bool:
    form = weight.parts[0].format
    how = form.activation
    if how is None or how.storage != form.storage or form.storage not in ("int8", "float8_e4m3fn"):
        return False
    if tuning.ptx and weight.dtype == "float32":
        # NVIDIA's matrix units add products of FP8 elements with about 14 bits. Also, where float32 differs in its last
        # bit, an element is rounded to the next one. Whoever computes in float32 would see both.
        return False
    able = tuning.integers if form.storage == "int8" else tuning.float8
    wide = [each for each in (how.group, form.group) if 0 < each < weight.columns]
    whole = all(each >= _LEAST_COLUMNS and each == power_of_two(each) for each in wide)
    return able and whole and (how.group != 0 or weight.columns <= MAX_ROUNDED_COLUMNS)


def round_rows(tuning: Tuning, x: torch.Tensor, weight: StoredMatrix) -> RoundedRows:
    """x [tokens, columns] rounded for products with ``weight``."""
    x_row, apart = x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), x.shape[1]
    tokens, columns = x.shape
    made = rounded_room(tuning, weight, tokens, columns, x.device)
    if tokens and made.group == 0 and columns > _CHUNK:
        _long_launch(tuning, weight.form.kind)((tokens, 1, 1), x, made.elements, made.scales, columns, x_row)
    elif tokens:
        early = tokens <= EARLY_TOKENS
        launch, programs = _launch_of(tuning, round_rows_kernel, columns, made.group, weight.form.kind, early=early)
        held = made.elements.shape[0]
        launch((tokens, programs, 1), x, made.scales, made.elements, made.scales, held, columns, x_row)
    return made


@memoized
def _long_launch(tuning: Tuning, stored: str) -> PreparedLaunch:
    return PreparedLaunch(
        round_long_rows_kernel,
        CHUNK=_CHUNK,
        OVERLAP=tuning.overlap,
        num_warps=8,
        **element_constants(tuning, stored),
        **tuning.launch,
    )


def norm_round(
    tuning: Tuning, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, offset: float,
    dtype: torch.dtype, weight: StoredMatrix, keep: bool = False,
) -> tuple[RoundedRows, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(what ``norm_rows`` gives of x [T, hidden] in ``dtype``, rounded; the sum with a residual, written over the
    residual; the rows themselves, only if they are kept). A fixed scale is told by token where the library wants it."""
    x_row, apart = x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), x.shape[1]
    tokens, size = x.shape
    made = rounded_room(tuning, weight, tokens, size, x.device)
    one = len(weight.shape) > 2 or weight.one_scale
    spread = made.group < 0 and tokens > MAX_OWN_TOKENS and tuning.scaled_rows and not one
    fixed, group = made.scales, made.group
    if spread:
        made = replace(made, scales=torch.empty(1, tokens, dtype=torch.float32, device=x.device), group=0)
    y = torch.empty((tokens, size) if keep else (1,), dtype=dtype, device=x.device)
    total = None if residual is None else residual.contiguous()
    if tokens:
        launch = _norm_launch(tuning, size, group, weight.form.kind, eps, offset, total is not None, keep, spread)
        old = total if total is not None else x
        launch(
            (tokens, 1, 1), x, old, norm, fixed, total if total is not None else y, y, made.elements, made.scales,
            made.elements.shape[0], x_row,
        )  # fmt: skip
    return made, total, y


def act_round(tuning: Tuning, x: torch.Tensor, inner: int, activation: str, weight: StoredMatrix) -> RoundedRows:
    """What ``act_rows`` gives of rows [T, 2 * inner], rounded."""
    (tokens, wide), (x_row, apart) = x.shape, x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), wide
    made = rounded_room(tuning, weight, tokens, inner, x.device)
    if tokens:
        launch, programs = _launch_of(tuning, act_round_kernel, inner, made.group, weight.form.kind, activation)
        held = made.elements.shape[0]
        launch((tokens, programs, 1), x, made.scales, made.elements, made.scales, held, x_row, inner, x)
    return made


def activation_sizes(tuning: Tuning, tokens: int, gate_up: LinearWeight, down: LinearWeight) -> FewSizes | None:
    """Sizes of ``activated_product``, whose result is what ``down`` multiplies; None where the activation is in a
    launch of its own."""
    if not rounds(tuning, tokens, gate_up) or not rounds(tuning, tokens, down):
        return None
    same = _group(down) == _group(gate_up) and (gate_up.dtype, gate_up.out) == ("bfloat16", None)
    size = gate_up.rows, gate_up.columns, form_of(gate_up.parts), _group(gate_up)
    return activated_sizes(tuning, tokens, *size) if same else None


def activated_product(
    tuning: Tuning, p: FewSizes, x: RoundedRows, weight: StoredMatrix, activation: str
) -> RoundedRows:
    """The product of rows with gate and up rows, activated and rounded, in one launch."""
    return RoundedRows(*rounded_activated(tuning, p, x.elements, x.scales, weight, activation), x.group, x.tokens)


def rounded_room(tuning: Tuning, weight: StoredMatrix, tokens: int, columns: int, where: torch.device) -> RoundedRows:
    """Memory for rows, of as many as the library takes; a fixed scale is the weight's."""
    assert weight.activation is not None, "asked of weights whose products are rounded"
    group = 0 if weight.activation.group >= columns else weight.activation.group
    dtype = torch.int8 if weight.form.kind == "int8" else torch.float8_e4m3fn
    held = -(-tokens // HELD_TOKENS) * HELD_TOKENS if tuning.scaled_blocks and group > 0 else tokens
    elements, scales = torch.empty(held, columns, dtype=dtype, device=where), weight.fixed
    if scales is None:
        groups = -(-columns // group) if group else 1
        scales = torch.empty(groups, held, dtype=torch.float32, device=where)
    return RoundedRows(elements, scales, group, tokens)


def element_constants(tuning: Tuning, stored: str) -> dict[str, str | bool]:
    """Constants of the kernels that round to such elements."""
    kind = "int8" if stored == "int8" else "e4m3"
    return {"KIND": kind, "CAST": kind == "e4m3" and tuning.ptx and tuning.float8}


@memoized
def _launch_of(
    tuning: Tuning, kernel: Any, columns: int, group: int, stored: str, activation: str = "", early: bool = False
) -> tuple[PreparedLaunch, int]:
    """(launch, programs for a token) of ``round_rows_kernel`` or ``act_round_kernel``; ``early``: of the former, lets
    the next launch in before it waits."""
    wide = power_of_two(columns) if group == 0 else group if group > 0 else min(_AT_A_TIME, power_of_two(columns))
    each = max(1, min(_AT_A_TIME // wide, power_of_two(-(-columns // group)))) if group > 0 else 1
    more: dict[str, Any] = (
        {"ACT": activation} if activation else {"GROUP": columns if group == 0 else wide, "EARLY": early}
    )
    launch = PreparedLaunch(
        kernel, FIXED=group < 0, EACH=each, WIDE=wide, OVERLAP=tuning.overlap,
        num_warps=max(1, min(16, each * wide // 512)), **element_constants(tuning, stored), **more, **tuning.launch,
    )  # fmt: skip
    return launch, -(-columns // (wide * each))


@memoized
def _norm_launch(
    tuning: Tuning, size: int, group: int, stored: str, eps: float, offset: float, add: bool, keep: bool, spread: bool
) -> PreparedLaunch:
    block = power_of_two(size)
    return PreparedLaunch(
        norm_round_kernel, size=size, eps=eps, offset=offset, ADD=add, KEEP=keep, FIXED=group < 0, SPREAD=spread,
        BLOCK=block, WIDE=group if group > 0 else block, OVERLAP=tuning.overlap,
        num_warps=max(1, min(16, block // 512)), **element_constants(tuning, stored), **tuning.launch,
    )  # fmt: skip


def rounded_linear(
    tuning: Tuning, out: torch.dtype, x: torch.Tensor, weight: StoredMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, columns] to [T, rows] in ``out``; see ``rounded_kernel``."""
    return rounded_product(tuning, out, round_rows(tuning, x, weight), weight, bias)


def rounded_product(
    tuning: Tuning, out: torch.dtype, x: RoundedRows, weight: StoredMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same of rows that are rounded: by the library if it has the product and the tokens are many."""
    where, (rows, columns), tokens = x.elements.device, weight.shape, x.elements.shape[0]
    if not x.tokens:
        return torch.empty(0, rows, dtype=out, device=where)
    elements, scales, blocks, form = pieces(weight)
    own = MAX_OWN_TOKENS_ONE_SCALE if weight.one_scale and x.group < 0 else MAX_OWN_TOKENS
    many = tokens > own and out == torch.bfloat16 and not tuning.resized
    if many and _has_library(tuning, rows, columns, form, x.group):
        return scaled_product(x.elements, x.scales, weight, bias)[: x.tokens]
    few = few_sizes(tuning, tokens, rows, columns, form, x.group)
    if few is not None:
        return rounded_few(tuning, few, out, x.elements, x.scales, x.group, weight, bias)[: x.tokens]
    y = torch.empty(tokens, rows, dtype=out, device=where)
    launch, grid, sums = _launch(tuning, tokens, rows, columns, form, x.group, bias is not None)
    parts = arrived = y
    if sums is not None:
        parts = torch.empty(sums, dtype=torch.float32, device=where)
        arrived = tuning.arrivals.of(where, grid[0])
    launch(
        grid, x.elements, x.scales, elements.view(x.elements.dtype), scales, bias if bias is not None else scales, y,
        parts, arrived, tokens, rows, columns, blocks,
    )  # fmt: skip
    return y[: x.tokens]


@memoized
def _launch(
    tuning: Tuning, tokens: int, rows: int, columns: int, form: Form, group: int, bias: bool
) -> tuple[PreparedLaunch, tuple[int, int, int], tuple[int, int, int] | None]:
    """(launch, its grid, shape of its partial sums or None)."""
    p = tuning.rounded(tokens, rows, columns, most_columns(form, group))
    tiles, each, splits = _grid(p, tokens, rows, columns)
    launch = _prepared(tuning, p, rows, columns, form, group, each, splits, bias)
    return launch, (tiles, 1, splits), (tiles * splits, p.n, p.m) if splits > 1 else None


@memoized
def _prepared(
    tuning: Tuning, p: Product, rows: int, columns: int, form: Form, group: int, each: int, splits: int, bias: bool
) -> PreparedLaunch:
    """The same for all numbers of tokens that have the same sizes."""
    return PreparedLaunch(
        rounded_kernel, y_row=rows, each=each, BIAS=bias, SPLITS=splits, BM=p.m, BN=p.n, BK=p.k,
        EVEN=columns % p.k == 0, AT_ONCE=_TILES_AT_ONCE, HIGH=form.high, WIDE=form.wide, GROUP=group,
        SAME=form.wide > 0 and form.high % p.n == 0, INTEGER=form.kind == "int8", OVERLAP=tuning.overlap,
        num_warps=p.warps, num_stages=p.stages, **tuning.launch,
    )  # fmt: skip


def _grid(p: Product, tokens: int, rows: int, columns: int) -> tuple[int, int, int]:
    """(tiles, columns of a span, number of spans)."""
    each = -(-columns // (p.splits * p.k)) * p.k
    return -(-rows // p.n) * -(-tokens // p.m), each, -(-columns // each)


def most_columns(form: Form, group: int) -> int:
    """Columns that share all scales, up to those that a tile may have."""
    return min([128, *(each for each in (form.wide, group) if each > 0)])


def rounding_bytes(tokens: int, columns: int, form: QuantFormat) -> int:
    """Bytes of rounded activations."""
    assert form.activation is not None, "as in rounds"
    tokens = -(-tokens // HELD_TOKENS) * HELD_TOKENS
    return tokens * (columns + 4 * -(-columns // (form.activation.group if form.activation.group > 0 else columns)))


def rounded_bytes(tuning: Tuning, tokens: int, weight: LinearWeight) -> int:
    """Bytes that ``rounded_linear`` takes besides its result."""
    form = weight.parts[0].format
    assert form.activation is not None, "as in rounds"
    wide, group = (each if 0 < each < weight.columns else 0 for each in (form.group, form.activation.group))
    p = tuning.rounded(tokens, weight.rows, weight.columns, most_columns(Form(wide=wide), group))
    tiles, _, splits = _grid(p, tokens, weight.rows, weight.columns)
    if not tuning.resized and _by_library(tuning, tokens, weight):
        sums = tuning.scaled_bytes
    else:
        sums = tiles * splits * p.n * p.m * 4 if splits > 1 else 0
    few = few_sizes(tuning, tokens, weight.rows, weight.columns, form_of(weight.parts), _group(weight))
    if few is not None:
        sums = few_sums(few, tokens, weight.rows, weight.columns)
        if _group(weight) < 0 and tokens > MAX_OWN_TOKENS_ONE_SCALE:  # scales are known when weights are loaded
            sums = max(sums, tuning.scaled_bytes)
    result = (HELD_TOKENS - 1) * weight.rows * 4  # rows of garbage
    return sums + result + rounding_bytes(tokens, weight.columns, form)
