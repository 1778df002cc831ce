"""Products of one token with packed weights of four bits, with a norm before and an activation after in the launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.contracts.quant import WeightPart
from evener_kernels_triton.blocks import PackedForm
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.packed_token import packed_token_kernel
from evener_kernels_triton.packed import PackedMatrix, Segment, segments_of
from evener_kernels_triton.tables import MOST
from evener_kernels_triton.tuning import Product, Tuning, memoized

#: How scales are stored that the kernel reads, with the groups.
_READ = {
    "half": (32, 64, 128, 256), "zero": (64, 128, 256), "super": (32,), "power": (32,), "e4m3": (16,),
    "float": (64, 128, 256),
}  # fmt: skip
#: Of numbers that are looked up, what the kernel subtracts from the whole numbers that it has, and what 1 stands for.
_LOOKED_UP = {"e2m1": (12, 0.5), "table": (MOST, 1 / MOST)}


def reads_token(tuning: Tuning, form: PackedForm, rows: int, columns: int, element: int, halves: int = 1) -> bool:
    """Whether one token's product with ``halves`` times ``rows`` rows is this; x has ``element`` bytes.

    Numbers of float32 have more bits than the 16 that x gets.
    """
    return reads_form(form) and element <= 2 and token_sizes(tuning, form, rows, columns, halves) is not None


def token_sizes(tuning: Tuning, form: PackedForm, rows: int, columns: int, halves: int) -> Product | None:
    """Launch sizes; None: other kernels are faster, or a row is too long."""
    return tuning.packed_token(rows, columns, halves, form.group, form.kind in _LOOKED_UP)


def reads_form(form: PackedForm) -> bool:
    """Whether the kernels know how the numbers and scales are stored."""
    return form.kind in ("q4", *_LOOKED_UP) and form.group in _READ.get(form.style, ())


def enters_token(tuning: Tuning, parts: Sequence[WeightPart], element: int, halves: int) -> bool:
    """Whether the same holds for each segment of a weight of these parts, with a norm; of halves, for the only one."""
    segments = list(segments_of(parts))
    if any(part.format.order == "act" or part.format.activation is not None for part in parts):
        return False
    if halves > 1 and len(segments) > 1:
        return False
    columns = parts[0].columns
    return all(reads_token(tuning, form, rows // halves, columns, element, halves) for rows, form in segments)


def packed_token(
    tuning: Tuning, out: torch.dtype, x: torch.Tensor, weight: PackedMatrix, *, bias: torch.Tensor | None = None,
    activation: str = "", residual: torch.Tensor | None = None, total: torch.Tensor | None = None,
    gain: torch.Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """One token [1, columns] to [1, rows], a launch for each segment, if ``reads_token`` holds for all of them; the
    other arguments as in ``linear.persistent_gemv``."""
    y = torch.empty(1, weight.shape[0] // (2 if activation else 1), dtype=out, device=x.device)
    for one in weight.segments:
        own = None if bias is None else bias[one.first : one.first + one.rows]
        token_segment(
            tuning, x, one, y, bias=own, activation=activation, residual=residual, total=total, gain=gain, eps=eps,
            offset=offset,
        )  # fmt: skip
    return y


def token_segment(
    tuning: Tuning, x: torch.Tensor, weight: Segment, y: torch.Tensor, *, bias: torch.Tensor | None = None,
    activation: str = "", residual: torch.Tensor | None = None, total: torch.Tensor | None = None,
    gain: torch.Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> None:  # fmt: skip
    """The same of one segment, into its columns of y."""
    launch, grid = _launch(
        tuning, weight.rows, weight.columns, weight.form, activation, residual is not None, gain is not None,
        bias is not None, eps, offset,
    )  # fmt: skip
    launch(
        grid, x, residual if residual is not None else x, total if total is not None else y,
        gain if gain is not None else x, weight.low.view(torch.int64), weight.scales, weight.tops,
        bias if bias is not None else x, y[:, weight.first :] if weight.first else y,
    )  # fmt: skip


def token_constants(tuning: Tuning, form: PackedForm) -> dict[str, str | int | float | bool]:
    """Arguments of the kernels."""
    zero, unit = _LOOKED_UP.get(form.kind, (form.zero, 1.0))
    return {
        "KIND": form.kind, "STYLE": form.style, "GROUP": form.group, "ZERO": zero, "BF16": form.bf16,
        "UNITS": form.units, "WORDS": form.words, "UNIT": unit, "PTX": tuning.ptx,
    }  # fmt: skip


@memoized
def _launch(
    tuning: Tuning, wide: int, columns: int, form: PackedForm, activation: str, add: bool, norm: bool, bias: bool,
    eps: float, offset: float,
) -> tuple[PreparedLaunch, tuple[int, int, int]]:  # fmt: skip
    """(launch for a segment of ``wide`` rows, its grid)."""
    halves = 2 if activation else 1
    rows = wide // halves
    p = token_sizes(tuning, form, rows, columns, halves)
    assert p is not None, "the caller asked"
    tiles, most = -(-rows // p.n), p.m * tuning.units
    launch = PreparedLaunch(
        packed_token_kernel, rows=rows, columns=columns, spans=form.spans(columns), eps=eps, offset=offset, ADD=add,
        NORM=norm, BIAS=bias, ACT=activation, BN=p.n, BK=p.k, OVERLAP=tuning.overlap,
        num_warps=p.warps, **token_constants(tuning, form), **tuning.launch,
    )  # fmt: skip
    return launch, (min(tiles, most), 1, 1)
