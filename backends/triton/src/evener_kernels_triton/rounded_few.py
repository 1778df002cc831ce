"""Products of few tokens with weights in float8_e4m3fn and rounded activations, on devices whose products of warp
groups multiply such numbers: the launch has weights under way before it waits for the activations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.prefill import compiler_has_warpgroups
from evener_kernels_triton.stored import Form, StoredMatrix, pieces
from evener_kernels_triton.tuning import Tuning, memoized, power_of_two

#: Columns of the kernel's step.
_SPAN = 128
#: Columns that one copy takes.
_COPIED = 16
#: Most tokens: a program has all of them.
MAX_FEW_TOKENS = 64
#: Bytes of shared memory that a program does not get.
_RESERVED = 1024
#: The smallest matrices that were timed.
_LEAST_ROWS, _LEAST_COLUMNS = 4096, 4096


class FewSizes(NamedTuple):
    """``n`` rows a program, all columns split into ``splits`` spans; ``unit`` steps of 128 columns in each of
    ``places`` of the ring. ``early``: the next launch is let in at the start."""

    n: int
    unit: int
    places: int
    splits: int
    early: bool = False


class _Shapes(NamedTuple):
    """Sizes by the shape of a weight."""

    many: FewSizes
    tall: FewSizes
    square: FewSizes
    long: FewSizes


#: By whether blocks have scales, and whether tokens are up to ``_FEWER``. Measured on an H200 for the four products of
#: Qwen3-8B, each with the launch before it, and as a layer, of 10 to 20 sizes: 24,576 x 4,096, 6,144 x 4,096, 4,096 x
#: 4,096, 4,096 x 12,288.
_TABLE = {
    (True, True): _Shapes(
        FewSizes(64, 1, 6, 1), FewSizes(64, 1, 6, 4), FewSizes(64, 2, 4, 4), FewSizes(64, 1, 6, 4, early=True)
    ),
    (False, True): _Shapes(
        FewSizes(64, 1, 6, 1, early=True), FewSizes(64, 1, 6, 4, early=True), FewSizes(64, 2, 4, 2, early=True),
        FewSizes(64, 2, 4, 4, early=True),
    ),
    (True, False): _Shapes(
        FewSizes(64, 1, 4, 1, early=True), FewSizes(64, 2, 6, 1), FewSizes(64, 2, 6, 1, early=True),
        FewSizes(64, 1, 12, 2, early=True),
    ),
    (False, False): _Shapes(
        FewSizes(64, 1, 4, 1), FewSizes(64, 2, 3, 2), FewSizes(64, 2, 3, 2), FewSizes(64, 2, 3, 2)
    ),
}  # fmt: skip
_FEWER = 32


@memoized
def few_sizes(tuning: Tuning, tokens: int, rows: int, columns: int, form: Form, group: int) -> FewSizes | None:
    """Sizes for a weight of this form and rounded activations of which ``group`` columns share a scale (0: all, -1: so
    do all tokens); None where the kernel is not used: for smaller weights, which were not timed, and with sizes that
    were measured for other kernels (``Tuning.changes``)."""
    able = tuning.warpgroups and tuning.converts and not tuning.resized and compiler_has_warpgroups()
    if not able or not 1 < tokens <= MAX_FEW_TOKENS or not _computes(form, group, columns):
        return None
    if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
        return None
    by_shape = _TABLE[form.wide > 0, tokens <= _FEWER]
    if -(-rows // 64) >= 2 * tuning.units:
        p = by_shape.many
    elif rows > columns:
        p = by_shape.tall
    else:
        p = by_shape.long if columns >= 2 * rows else by_shape.square
    return p if _held(p, tokens, rows, columns, form) <= tuning.shared - _RESERVED else None


@memoized
def activated_sizes(tuning: Tuning, tokens: int, rows: int, columns: int, form: Form, group: int) -> FewSizes | None:
    """The same for gate and up rows with the activation in the product (``rounded_activated``): blocks alone, as a
    scale needs a whole row otherwise. A layer of Qwen3-8B took 64.2 µs on an H200 with 16 tokens, 65.0 with the
    activation in a launch of its own, and 83.6 and 84.5 with 64."""
    whole = group == _SPAN and rows % (2 * _SPAN) == 0
    if not whole or few_sizes(tuning, tokens, rows, columns, form, group) is None:
        return None
    p = FewSizes(2 * _SPAN, 1, 4 if tokens <= _FEWER else 5, 1)
    return p if _held(p, tokens, rows, columns, form) <= tuning.shared - _RESERVED else None


def _held(p: FewSizes, tokens: int, rows: int, columns: int, form: Form) -> int:
    """Bytes of shared memory: the rings, and factors of blocks."""
    _, each, _ = _grid(p, rows, columns)
    m = _tile_tokens(tokens)
    factors = max(1, p.n // _SPAN) * power_of_two(each) * m * 4 if form.wide else 0
    return p.places * p.unit * (p.n + m) * _SPAN + factors


def _computes(form: Form, group: int, columns: int) -> bool:
    """Whether the kernel has the product: steps and tiles have one scale of the weight, or all columns have."""
    blocks = form.wide == _SPAN and group == _SPAN and form.high % _SPAN == 0
    return form.kind == "e4m3" and columns % _COPIED == 0 and (blocks or (form.wide == 0 and group <= 0))


def few_sums(p: FewSizes, tokens: int, rows: int, columns: int) -> int:
    """Bytes of the partial sums."""
    tiles, _, splits = _grid(p, rows, columns)
    return tiles * splits * p.n * _tile_tokens(tokens) * 4 if splits > 1 else 0


def rounded_few(
    tuning: Tuning, p: FewSizes, out: torch.dtype, x: torch.Tensor, scales: torch.Tensor, group: int,
    weight: StoredMatrix, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [tokens, columns] of float8_e4m3fn with its scales to [tokens, rows] in ``out``."""
    (rows, columns), tokens = weight.shape, x.shape[0]
    elements, of_weight, blocks, form = pieces(weight)
    y = torch.empty(tokens, rows, dtype=out, device=x.device)
    launch, grid = _launch(tuning, p, tokens, rows, columns, form, group, bias is not None)
    parts = arrived = y
    if grid[1] > 1:
        parts = torch.empty(grid[0] * grid[1], p.n, _tile_tokens(tokens), dtype=torch.float32, device=x.device)
        arrived = tuning.arrivals.of(x.device, grid[0])
    launch(
        grid, x, scales, elements.view(x.dtype), of_weight, bias if bias is not None else of_weight, y, parts, arrived,
        tokens, rows, columns, blocks, y,
    )  # fmt: skip
    return y


def rounded_activated(
    tuning: Tuning, p: FewSizes, x: torch.Tensor, scales: torch.Tensor, weight: StoredMatrix, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, columns] of float8_e4m3fn with its scales of 128 columns to the activated product with a weight of
    gate and up rows, rounded in the same way: (float8_e4m3fn [tokens, rows / 2], scales). Tiles have 256 rows."""
    (wide, columns), tokens = weight.shape, x.shape[0]
    elements, of_weight, blocks, form = pieces(weight)
    y = torch.empty(tokens, wide // 2, dtype=x.dtype, device=x.device)
    made = torch.empty(wide // 2 // _SPAN, tokens, dtype=torch.float32, device=x.device)
    launch, grid = _launch(tuning, p, tokens, wide, columns, form, _SPAN, False, activation)
    launch(
        grid, x, scales, elements.view(x.dtype), of_weight, of_weight, y, y, y, tokens, wide // 2, columns, blocks, made
    )
    return y, made


@memoized
def _launch(
    tuning: Tuning, p: FewSizes, tokens: int, rows: int, columns: int, form: Form, group: int, bias: bool,
    activation: str = "",
) -> tuple[PreparedLaunch, tuple[int, int, int]]:  # fmt: skip
    """(launch, its grid)."""
    tiles, each, splits = _grid(p, rows, columns)
    launch = _prepared(tuning, p, _tile_tokens(tokens), columns, form, group, each, splits, bias, activation)
    return launch, (tiles, splits, 1)


@memoized
def _prepared(
    tuning: Tuning, p: FewSizes, tokens: int, columns: int, form: Form, group: int, each: int, splits: int, bias: bool,
    activation: str,
) -> PreparedLaunch:  # fmt: skip
    """The same for all numbers of tokens that a tile has room for. The ring is filled with steps of the span alone."""
    return PreparedLaunch(
        _kernel(), each=each, BIAS=bias, ACT=activation, SPLITS=splits, BM=tokens, BN=p.n, U=p.unit,
        PLACES=min(p.places, each // p.unit + 1), STEPS=power_of_two(each), EVEN=columns % (each * _SPAN) == 0,
        HIGH=form.high, BLOCKS=form.wide > 0, FIXED=group < 0, EARLY=p.early, OVERLAP=tuning.overlap,
        num_warps=p.n // 16, **tuning.launch,
    )  # fmt: skip


def _grid(p: FewSizes, rows: int, columns: int) -> tuple[int, int, int]:
    """(tiles of rows, steps of a span, number of spans)."""
    steps = -(-columns // _SPAN)
    each = -(-steps // (p.splits * p.unit)) * p.unit
    return -(-rows // p.n), each, -(-steps // each)


def _tile_tokens(tokens: int) -> int:
    return max(16, power_of_two(tokens))


def _kernel() -> Any:
    from evener_kernels_triton.jit.rounded_few import rounded_few_kernel

    return rounded_few_kernel
