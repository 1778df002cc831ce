"""torch's products of float8_e4m3fn with scales, which call the vendor's library."""

from __future__ import annotations

import torch

from evener_kernels_triton.stored import Form, StoredMatrix
from evener_kernels_triton.tuning import Tuning

#: Scales of blocks of activations are column-major, and the library wants columns to start at multiples of 16 bytes; it
#: has the product for any multiple of so many tokens.
HELD_TOKENS = 16
#: The library takes rows and columns in multiples of this.
_UNIT = 16
_BLOCK = 128
#: Rows of scales of the weight start at multiples of so many blocks.
_BLOCKS = 4


def scaled_refusal(tuning: Tuning, rows: int, columns: int, form: Form, group: int) -> str | None:
    """Why ``scaled_product`` cannot serve; None if it can, for bfloat16 results.

    Args:
        form, group: of the weight's scales, and columns of a token that share one (0: all, -1: so do all tokens).
    """
    if form.kind != "e4m3":
        return "takes float8_e4m3fn"
    if rows % _UNIT or columns % _UNIT:
        return f"takes rows and columns in multiples of {_UNIT}"
    if (form.high, form.wide) == (1, 0) and group <= 0:
        return None if tuning.scaled_rows else "the device has no such product with scales of rows"
    if (form.high, form.wide, group) != (_BLOCK, _BLOCK, _BLOCK):
        return "takes one scale for each row, or blocks of 128"
    if rows % _BLOCK or columns % (_BLOCKS * _BLOCK):
        return f"takes {_BLOCK} rows and {_BLOCKS * _BLOCK} columns at a time, with blocks"
    return None if tuning.scaled_blocks else "the device has no such product with scales of blocks"


def scaled_product(
    x: torch.Tensor, scales: torch.Tensor, weight: StoredMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, columns] to bfloat16 [T, rows]; with blocks, T is a multiple of ``HELD_TOKENS``.

    Args:
        scales: float32 [1, T], [columns / 128, T], or [1] for all tokens.
    """
    elements = weight.elements.view(torch.float8_e4m3fn).t()
    # torch knows the kind of scales by their shapes and strides: those of blocks are column-major for x, row-major for
    # the weight, and transposed as the weight is.
    of_x, of_weight = scales.t(), weight.scales.t()
    if scales.numel() == 1 and weight.one_scale:
        # 256 tokens by 4,096 x 12,288 take 24.3 µs on an H200, and 32.7 with scales of rows.
        of_x, of_weight = scales.view(1), weight.scales.view(-1)[:1]
    elif scales.shape[0] == 1:
        of_x = scales.view(-1, 1).expand(x.shape[0], 1).contiguous()
    y = torch._scaled_mm(x, elements, scale_a=of_x, scale_b=of_weight, out_dtype=torch.bfloat16)
    return y if bias is None else y.add_(bias)
