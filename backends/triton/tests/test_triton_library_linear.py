"""Products of torch's library: which sums are kept in float32 until the bias is added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener_kernels_triton.linear import library_linear, library_workspace


def wide_sums(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, columns: int, biased: bool) -> bool:
    """Whether a product of 33 tokens on a device keeps its sums in float32 until the bias is added."""
    found = []
    mm = torch.mm

    def recorded(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        found.append(out_dtype)
        return mm(a, b).to(out_dtype or a.dtype)

    monkeypatch.setattr(torch, "mm", recorded)
    x = torch.empty(33, columns, dtype=dtype, device="meta")
    weight = torch.empty(rows, columns, dtype=dtype, device="meta")
    bias = torch.empty(rows, dtype=dtype, device="meta") if biased else None
    y = library_linear(dtype, x, weight, bias)
    assert y.dtype == dtype and y.shape == (33, rows)
    return found == [torch.float32]


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "biased", "wide"),
    [
        ("bfloat16", 1033, 1288, True, True),
        ("bfloat16", 1032, 1291, True, True),
        ("bfloat16", 1536, 896, True, False),
        ("bfloat16", 1033, 1291, False, False),
        ("float16", 1536, 896, True, True),
        ("float32", 1033, 1291, True, False),
    ],
)
def test_a_sum_that_the_library_would_round_before_the_bias_is_kept_in_float32_and_has_room(
    monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, columns: int, biased: bool, wide: bool
) -> None:
    assert wide_sums(monkeypatch, getattr(torch, dtype), rows, columns, biased) == wide
    call: Any = SimpleNamespace(
        static={"rows": rows, "columns": columns, "dtype": dtype}, device=SimpleNamespace(host_memory=False),
        bucket=SimpleNamespace(high=33),
    )  # fmt: skip
    if biased:  # a call does not say whether it has a bias: room is kept for one
        assert library_workspace(call) == (4 * 33 * rows if wide else 0)
