"""Products with packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.contracts.quant import WeightPart
from evener_kernels_triton.blocks import PackedForm
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.packed import packed_kernel, unpack_kernel
from evener_kernels_triton.kernel import PRECISION
from evener_kernels_triton.packed import PackedMatrix, Segment, segments_of
from evener_kernels_triton.packed_token import reads_token, token_segment
from evener_kernels_triton.tuning import MAX_SUMMED_TOKENS, Product, Tuning, memoized

#: Rows of a matrix that a program unpacks.
_UNPACKED_ROWS = 32


def packed_linear(
    tuning: Tuning, out: torch.dtype, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, columns] times the matrix, [T, rows], in the dtype ``out``; a launch for each segment. ``factors``: float32
    [T] that the rows of x are to be multiplied by.

    Raises:
        ValueError: x or the bias do not fit the matrix.
    """
    rows, columns = weight.shape
    if x.dim() != 2 or x.shape[1] != columns or (bias is not None and bias.shape != (rows,)):
        given = "no bias" if bias is None else f"a bias {list(bias.shape)}"
        raise ValueError(f"x {list(x.shape)} and {given} do not fit a weight of {rows} x {columns}")
    x_row, apart = x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), columns
    y = torch.empty(x.shape[0], rows, dtype=out, device=x.device)
    element = x.dtype.itemsize
    for one in weight.segments:
        own = None if bias is None else bias[one.first : one.first + one.rows]
        if x.shape[0] == 1 and factors is None and reads_token(tuning, one.form, one.rows, columns, element):
            token_segment(tuning, x if one.order is None else x.index_select(1, one.order), one, y, bias=own)
            continue
        source, row = (x, x_row) if one.order is None else (x.index_select(1, one.order), columns)
        _segment(tuning, source, row, one, y, rows, own, factors)
    return y


def _segment(
    tuning: Tuning, x: torch.Tensor, x_row: int, weight: Segment, y: torch.Tensor, y_row: int,
    bias: torch.Tensor | None, factors: torch.Tensor | None,
) -> None:  # fmt: skip
    tokens = x.shape[0]
    launch, grid, sums = _launch(
        tuning, tokens, weight.rows, weight.columns, weight.form, x.dtype, y_row, bias is not None, factors is not None
    )
    target = y[:, weight.first :] if weight.first else y
    parts = arrived = y
    if sums is not None:
        parts = torch.empty(sums, dtype=torch.float32, device=x.device)
        arrived = tuning.arrivals.of(x.device, grid[0] * grid[1])
    launch(
        grid, x, weight.low, weight.high, weight.scales, weight.tops, x if factors is None else factors,
        bias if bias is not None else x, target, parts, arrived, tokens, weight.rows, weight.columns, x_row,
    )  # fmt: skip


@memoized
def _launch(
    tuning: Tuning, tokens: int, rows: int, columns: int, form: PackedForm, dtype: torch.dtype, y_row: int, bias: bool,
    factors: bool,
) -> tuple[PreparedLaunch, tuple[int, int, int], tuple[int, int, int] | None]:  # fmt: skip
    """(launch, its grid, shape of its partial sums or None)."""
    spans = form.spans(columns)
    p = tuning.packed(tokens, rows, columns, form.columns, dtype.itemsize)
    across, down, each, splits = _grid(p, tokens, rows, spans)
    launch = _prepared(tuning, p, columns, form, dtype, spans, each, splits, y_row, bias, factors)
    return launch, (across, down, splits), (across * down * splits, p.n, p.m) if splits > 1 else None


@memoized
def _prepared(
    tuning: Tuning, p: Product, columns: int, form: PackedForm, dtype: torch.dtype, spans: int, each: int, splits: int,
    y_row: int, bias: bool, factors: bool,
) -> PreparedLaunch:  # fmt: skip
    """The same for all numbers of tokens that have the same sizes."""
    return PreparedLaunch(
        packed_kernel, y_row=y_row, spans=spans, each=each, FACTORS=factors, BIAS=bias, SPLITS=splits, BM=p.m, BN=p.n,
        EVEN=columns % form.columns == 0, PRECISION=PRECISION, SUMS=p.m <= MAX_SUMMED_TOKENS, OVERLAP=tuning.overlap,
        num_warps=p.warps, num_stages=form.stages(p.stages, tuning.ptx), **form.constants(dtype, tuning.ptx),
        **tuning.launch,
    )  # fmt: skip


def _grid(p: Product, tokens: int, rows: int, spans: int) -> tuple[int, int, int, int]:
    """(tiles of rows, tiles of tokens, spans of a split, number of splits)."""
    each = -(-spans // p.splits)
    return -(-rows // p.n), -(-tokens // p.m), each, -(-spans // each)


def packed_bytes(tuning: Tuning, tokens: int, parts: Sequence[WeightPart], element: int) -> int:
    """Bytes that ``packed_linear`` takes besides its result, for a weight of these parts; x has ``element`` bytes: a
    copy of x in act-order, and partial sums."""
    most = 0
    for rows, form in segments_of(parts):
        columns = parts[0].columns
        if tokens == 1 and reads_token(tuning, form, rows, columns, element):
            continue
        p = tuning.packed(tokens, rows, columns, form.columns, element)
        across, down, _, splits = _grid(p, tokens, rows, form.spans(columns))
        most = max(most, across * down * splits * p.n * p.m * 4 if splits > 1 else 0)
    ordered = any(part.format.order == "act" for part in parts)
    return most + ordered * tokens * parts[0].columns * element


def unpacked_bytes(parts: Sequence[WeightPart], element: int) -> int:
    """Bytes that ``unpacked`` takes besides its result, whose numbers have ``element`` bytes: a part in act-order is
    unpacked into memory of its own first, and its order is widened to int64."""
    return max((p.columns * (p.rows * element + 8) for p in parts if p.format.order == "act"), default=0)


def unpacked(tuning: Tuning, weight: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in ``dtype``."""
    rows, columns = weight.shape
    y = torch.empty(rows, columns, dtype=dtype, device=weight.segments[0].low.device)
    for one in weight.segments:
        own = y[one.first : one.first + one.rows]
        # Columns in act-order are put back where x has them.
        made = own if one.order is None else torch.empty_like(own)
        unpack_kernel[(-(-one.rows // _UNPACKED_ROWS), one.form.spans(columns))](
            one.low, one.high, one.scales, one.tops, made, one.rows, columns, columns, BN=_UNPACKED_ROWS,
            OVERLAP=tuning.overlap, **one.form.constants(dtype, tuning.ptx), **tuning.launch,
        )  # fmt: skip
        if one.order is not None:
            own.index_copy_(1, one.order.long(), made)
    return y
