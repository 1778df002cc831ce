"""Rounded activations of four-bit weights (W4A8, W4AFP8). No matrix unit multiplies four bits by eight: the kernels for
packed weights multiply the elements as numbers of the compute dtype, and sums by the tokens' scales.

At every number of tokens, as this is a part of the model and not a way to save time.
"""

from __future__ import annotations

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.storage import Rounding
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.rounded_values import round_values_kernel
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.tuning import Tuning, memoized, power_of_two

#: Most columns that a program takes at a time.
_CHUNK = 4096
#: A power of two that brings the elements below one, so that sums in float16 stay as small as those of activations.
_SHARES = {"int8": 2.0**-7, "float8_e4m3fn": 2.0**-9}


def rounds_values(weight: LinearWeight) -> Rounding | None:
    """How activations are rounded before products with ``weight``; None: not, as for weights that are not packed and
    for parts that ask for different things."""
    if weight.layout != PACKED.layout:
        return None
    how, *others = {part.format.activation for part in weight.parts}
    whole = how is not None and (how.group == 0 or how.group >= weight.columns)
    return how if whole and not others else None


def rounded_values_bytes(rows: int, weight: LinearWeight, element: int) -> int:
    """Bytes of rows that ``round_values`` makes of activations of ``element`` bytes."""
    return rows * (weight.columns * element + 4) if rounds_values(weight) is not None else 0


def round_values(tuning: Tuning, x: torch.Tensor, how: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, columns] rounded with a scale a token: (rows in the dtype of x, float32 [tokens] that multiply
    them)."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, columns = x.shape
    y = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        _launch(tuning, columns, how.storage)((tokens, 1, 1), x, y, factors, columns, x.stride(0))
    return y, factors


@memoized
def _launch(tuning: Tuning, columns: int, storage: str) -> PreparedLaunch:
    chunk = min(_CHUNK, power_of_two(columns))
    return PreparedLaunch(
        round_values_kernel, SHARE=_SHARES[storage], KIND="int8" if storage == "int8" else "e4m3", CHUNK=chunk,
        OVERLAP=tuning.overlap, num_warps=max(1, min(8, chunk // 512)), **tuning.launch,
    )  # fmt: skip
