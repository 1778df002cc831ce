"""Products of one token with weights in float8_e4m3fn, with a norm before and an activation after in the launch, on
devices whose products of warp groups multiply such numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.prefill import compiler_has_warpgroups
from evener_kernels_triton.stored import Form, StoredMatrix
from evener_kernels_triton.tuning import Tuning, memoized

#: Columns of the kernel's span.
_SPAN = 128
#: Columns that one copy takes.
_COPIED = 16
#: Steps that the kernel loads scales ahead: more steps than these are a multiple.
_AHEAD = 4
#: Of a thread, so that two programs run on a unit.
_REGISTERS = 128


class TokenSizes(NamedTuple):
    """``spans`` of 128 columns side by side, ``unit`` of them after each other in each of ``places`` of the ring,
    ``programs`` for each unit of the device."""

    spans: int
    unit: int
    places: int
    programs: int


@memoized
def token_sizes(tuning: Tuning, rows: int, columns: int) -> TokenSizes | None:
    """None if the converting kernels should be used: small matrices were not timed, and x of a large one does not fit
    in one program.

    A layer of Qwen3-8B took 54.2 µs on an H200 (reading takes 42.1), 63.0 with the kernels that convert. Sizes with
    which programs of the next launch fit beside those of this one took 57 to 76.
    """
    if columns < 4096 or 2 * rows < 3 * 16 * tuning.units:
        return None
    unit, places = (2, 3) if columns == 4096 else (1, 4)
    held = 2 * columns + places * unit * 16384
    return TokenSizes(8, unit, places, 2) if held <= tuning.shared // 2 - 2048 else None


def reads_stored_token(tuning: Tuning, form: Form, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether one token of ``dtype`` and a matrix of this form are for the kernel. Sizes that were measured for others
    (``Tuning.changes``) are for those. Scales of rows are left to those too, which take as long."""
    known = form.kind == "e4m3" and form.wide > 0 and form.wide % _SPAN == 0 and dtype == torch.bfloat16
    able = tuning.warpgroups and tuning.converts and not tuning.resized and compiler_has_warpgroups()
    return known and able and columns % _COPIED == 0 and token_sizes(tuning, rows, columns) is not None


def stored_token(
    tuning: Tuning, x: torch.Tensor, weight: StoredMatrix, out: torch.dtype, *, bias: torch.Tensor | None = None,
    activation: str = "", residual: torch.Tensor | None = None, total: torch.Tensor | None = None,
    gain: torch.Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """As ``linear.persistent_gemv``, if ``reads_stored_token``."""
    wide, columns = weight.shape
    launch, grid, rows = _launch(
        tuning, wide, columns, weight.scales.shape[-1], weight.form, activation, residual is not None, gain is not None,
        bias is not None, eps, offset,
    )  # fmt: skip
    y = torch.empty(1, rows, dtype=out, device=x.device)
    launch(
        grid, x, residual if residual is not None else x, total if total is not None else y,
        gain if gain is not None else x, weight.elements.view(torch.float8_e4m3fn), weight.scales,
        bias if bias is not None else x, y,
    )  # fmt: skip
    return y


@memoized
def _launch(
    tuning: Tuning, wide: int, columns: int, blocks: int, form: Form, activation: str, add: bool, norm: bool,
    bias: bool, eps: float, offset: float,
) -> tuple[PreparedLaunch, tuple[int, int, int], int]:  # fmt: skip
    """(launch for a weight of ``wide`` rows, its grid, rows of the result)."""
    rows = wide // 2 if activation else wide
    p = token_sizes(tuning, wide, columns)
    assert p is not None, "the caller asked"
    step = p.spans * _SPAN
    steps = -(-columns // step)
    steps += -steps % (_AHEAD if steps > _AHEAD else p.unit)
    launch = PreparedLaunch(
        _kernel(), rows=rows, columns=columns, blocks=blocks, eps=eps, offset=offset, ADD=add, NORM=norm, BIAS=bias,
        ACT=activation, SPANS=p.spans, T=steps, U=p.unit, PLACES=p.places, EVEN=columns == steps * step,
        OVERLAP=tuning.overlap, HIGH=form.high, WIDE=form.wide, num_warps=p.spans, maxnreg=_REGISTERS,
        **tuning.launch,
    )  # fmt: skip
    each = 8 if activation else 16
    return launch, (min(-(-rows // each), p.programs * tuning.units), 1, 1), rows


def _kernel() -> Any:
    from evener_kernels_triton.jit.stored_token import stored_token_kernel

    return stored_token_kernel
