"""Rounding errors and scale errors that the kit finds in results."""

from __future__ import annotations

import pytest
import torch

from evener_conformance.kit.compare import difference

CLOSE = {"bfloat16": (2e-2, 2e-2), "float32": (1e-5, 1e-5)}


def results(seed: int) -> torch.Tensor:
    return torch.randn(6, 2048, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(20))
def test_rounding_to_nearest_is_right_whatever_is_rounded(seed: int) -> None:
    want = results(seed)
    assert difference(want.to(torch.bfloat16), want, CLOSE, "bfloat16") is None


def test_a_row_whose_sum_was_rounded_is_off_as_a_whole() -> None:
    want = results(1)
    got = want.clone()
    got[3] *= 1 + 2**-10
    said = difference(got.to(torch.bfloat16), want, CLOSE, "bfloat16")
    assert said is not None and "a whole row has a relative bias of +0.00" in said and "kept in bfloat16" in said


def test_a_common_scale_error_is_named_but_not_for_one_wrong_element() -> None:
    want = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    for dtype in ("float32", "bfloat16"):
        said = difference((want * 1.1).to(getattr(torch, dtype)), want, CLOSE, dtype)
        assert said is not None and said.endswith("; all of it is 1.1 times what it should be")
        one = want.clone()
        one[3, 4] += 9.0
        said = difference(one.to(getattr(torch, dtype)), want, CLOSE, dtype)
        assert said is not None and "times" not in said


def test_rounding_towards_zero_is_seen_over_all_rows() -> None:
    want = results(2)
    got = (want.view(torch.int32) & ~0xFFFF).view(torch.float32)
    said = difference(got.to(torch.bfloat16), want, CLOSE, "bfloat16")
    assert said is not None and "rounded towards zero" in said
