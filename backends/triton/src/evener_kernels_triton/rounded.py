"""Products of rounded activations with weights of one byte an element, where the checkpoint allows it and the matrix
unit multiplies such elements (``contracts.storage.Rounding``).

Only for more tokens than a few: of those, reading the weights takes most of the time, and ``stored`` reads no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.quant import QuantFormat
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.rounded import round_rows_kernel, rounded_kernel
from evener_kernels_triton.stored import STORED, Form, StoredMatrix, pieces
from evener_kernels_triton.tuning import Product, Tuning, memoized, power_of_two

#: Up to this many tokens, activations are used as they are.
MAX_KEPT_TOKENS = 16
#: A program finds the scale of so many columns; rows are not longer if they have one scale.
MAX_ROUNDED_COLUMNS = 1 << 15
#: Numbers that a program rounds, of a row with several scales.
_AT_A_TIME = 2048
#: Matrix units multiply so many columns of such elements at a time.
_LEAST_COLUMNS = 32
#: Tiles of tokens that programs take at the same time.
_TILES_AT_ONCE = 16


@dataclass(frozen=True)
class RoundedRows:
    """Activations as they are multiplied.

    Attributes:
        elements: float8_e4m3fn or int8 [tokens, columns].
        scales: float32 [groups, tokens], or [1] for all.
        group: columns that share a scale; 0: all, -1: so do all tokens.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    group: int


def rounds(tuning: Tuning, tokens: int, weight: LinearWeight) -> bool:
    """Whether products of up to ``tokens`` tokens with ``weight`` are of rounded activations."""
    return tokens > MAX_KEPT_TOKENS and weight.layout == STORED.layout and _fits(tuning, weight)


def _fits(tuning: Tuning, weight: LinearWeight) -> bool:
    form = weight.parts[0].format
    how = form.activation
    if how is None or how.storage != form.storage or form.storage not in ("int8", "float8_e4m3fn"):
        return False
    able = tuning.integers if form.storage == "int8" else tuning.float8
    wide = [each for each in (how.group, form.group) if 0 < each < weight.columns]
    whole = all(each >= _LEAST_COLUMNS and each == power_of_two(each) for each in wide)
    return able and whole and (how.group != 0 or weight.columns <= MAX_ROUNDED_COLUMNS)


def round_rows(tuning: Tuning, x: torch.Tensor, weight: StoredMatrix) -> RoundedRows:
    """x [tokens, columns] rounded for products with ``weight``."""
    assert weight.activation is not None, "asked of weights whose products are rounded"
    x_row, apart = x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), x.shape[1]
    (tokens, columns), where, how = x.shape, x.device, weight.activation
    group = 0 if how.group >= columns else how.group
    launch, programs, groups = _round_launch(tuning, columns, group, weight.form.kind)
    dtype = torch.int8 if weight.form.kind == "int8" else torch.float8_e4m3fn
    q = torch.empty(tokens, columns, dtype=dtype, device=where)
    fixed = weight.fixed
    scales = torch.empty(groups, tokens, dtype=torch.float32, device=where) if fixed is None else fixed
    if tokens:
        launch((tokens, programs, 1), x, scales if fixed is None else fixed, q, scales, tokens, columns, x_row)
    return RoundedRows(q, scales, group)


@memoized
def _round_launch(tuning: Tuning, columns: int, group: int, kind: str) -> tuple[PreparedLaunch, int, int]:
    """(launch, programs for a token, scales of a token)."""
    if group > 0:
        wide, groups = power_of_two(group), -(-columns // group)
        each = max(1, min(_AT_A_TIME // wide, power_of_two(groups)))
        real = group
    elif group == 0:
        wide, groups, each, real = power_of_two(columns), 1, 1, columns
    else:
        wide, groups, each = min(_AT_A_TIME, power_of_two(columns)), 0, 1
        real = wide
    programs = -(-columns // (real * each))
    launch = PreparedLaunch(
        round_rows_kernel, KIND="int8" if kind == "int8" else "e4m3", FIXED=group < 0, EACH=each, GROUP=real, WIDE=wide,
        OVERLAP=tuning.overlap, num_warps=max(1, min(16, each * wide // 512)), **tuning.launch,
    )  # fmt: skip
    return launch, programs, groups


def rounded_linear(
    tuning: Tuning, out: torch.dtype, x: torch.Tensor, weight: StoredMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, columns] to [T, rows] in ``out``; see ``rounded_kernel``."""
    return rounded_product(tuning, out, round_rows(tuning, x, weight), weight, bias)


def rounded_product(
    tuning: Tuning, out: torch.dtype, x: RoundedRows, weight: StoredMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same of rows that are rounded."""
    where, (rows, columns), tokens = x.elements.device, weight.shape, x.elements.shape[0]
    y = torch.empty(tokens, rows, dtype=out, device=where)
    if not tokens:
        return y
    elements, scales, blocks, form = pieces(weight)
    launch, grid, sums = _launch(tuning, tokens, rows, columns, form, x.group, bias is not None)
    parts = arrived = y
    if sums is not None:
        parts = torch.empty(sums, dtype=torch.float32, device=where)
        arrived = tuning.arrivals.of(where, grid[0])
    launch(
        grid, x.elements, x.scales, elements.view(x.elements.dtype), scales, bias if bias is not None else scales, y,
        parts, arrived, tokens, rows, columns, blocks,
    )  # fmt: skip
    return y


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
    return tokens * (columns + 4 * -(-columns // (form.activation.group if form.activation.group > 0 else columns)))


def rounded_bytes(tuning: Tuning, tokens: int, weight: LinearWeight) -> int:
    """Bytes that ``rounded_linear`` takes besides its result."""
    form = weight.parts[0].format
    assert form.activation is not None, "as in rounds"
    wide, group = (each if 0 < each < weight.columns else 0 for each in (form.group, form.activation.group))
    p = tuning.rounded(tokens, weight.rows, weight.columns, most_columns(Form(wide=wide), group))
    tiles, _, splits = _grid(p, tokens, weight.rows, weight.columns)
    sums = tiles * splits * p.n * p.m * 4 if splits > 1 else 0
    return sums + rounding_bytes(tokens, weight.columns, form)
