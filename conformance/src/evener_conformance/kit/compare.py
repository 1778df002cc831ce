"""Comparing a result with the expected one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Largest mean signed relative error that rounding to nearest leaves; rounding towards zero leaves 1.5 times as much.
_MAX_MEAN_BIAS = {torch.bfloat16: 2**-10, torch.float16: 2**-13}
_MIN_ELEMENTS = 2000
#: A single row may have this part of it: an error of a whole row, from a rounded sum, averages out over many rows.
_ROW_BIAS_FRACTION, _MIN_ROW_WIDTH = 1 / 4, 1000


def difference(
    got: torch.Tensor, want: torch.Tensor, tolerance: Mapping[str, tuple[float, float]], dtype: str,
    nearest: bool = True,
) -> str | None:  # fmt: skip
    """What is wrong with a result, or None. Shapes must agree, integers be equal, floats be within ``tolerance``
    (relative, absolute), and, if ``nearest``, the errors have no bias to one side."""
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)}, not {list(want.shape)}"
    if not want.is_floating_point():
        wrong = got.to(torch.int64) != want.to(torch.int64)
        return _where(got, want, wrong, "") if wrong.any() else None
    relative, absolute = tolerance[dtype]
    have, right = got.double(), want.double()
    close = torch.isclose(have, right, rtol=relative, atol=absolute, equal_nan=True)
    if not close.all():
        allowed = f"; allowed are {relative:g} relative and {absolute:g} absolute"
        return _where(have, right, ~close, allowed) + describe_scale_error(have, right, relative)
    return _describe_rounding_bias(have, right, got.dtype) if nearest else None


def is_rounded(got: torch.Tensor, dtype: str) -> bool:
    """Whether all of many numbers have the bits of a narrower dtype. One of float16 has them by chance in 1 of 8192
    cases, one of bfloat16 in 1 of 65536."""
    some = got[got != 0]
    return len(some) > 8 and torch.equal(some.to(getattr(torch, dtype)).to(some.dtype), some)


def describe_scale_error(got: torch.Tensor, want: torch.Tensor, relative: float) -> str:
    """Names the factor (by least squares) if the result is the expected one times one factor; else empty."""
    have, right = got.double().flatten(), want.double().flatten()
    use = have.isfinite() & right.isfinite()
    length = float(right[use] @ right[use])
    if not use.all() or len(have) < 2 or not length:
        return ""
    by = float(have @ right) / length
    left = have - by * right
    # One element that is far off is not a factor on all: the remainder must be as small as rounding errors.
    if abs(by - 1) <= relative or not by or float(left.norm()) > relative * float(have.norm()):
        return ""
    return f"; all of it is {by:.4g} times what it should be"


def _where(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, allowed: str) -> str:
    if not want.dim():
        return f"expected {want.item():.6g}, got {got.item():.6g}{allowed}"
    off = (got - want).abs().double().nan_to_num(torch.inf, torch.inf, torch.inf).masked_fill(~wrong, -1)
    at = torch.unravel_index(off.argmax(), off.shape)
    place = [int(i) for i in at]
    expected, found = want[tuple(place)].item(), got[tuple(place)].item()
    count = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    return f"{count}; worst at {place}: expected {expected:.6g}, got {found:.6g}{allowed}"


def _describe_rounding_bias(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Rounding to nearest gives errors to both sides; a bias to one side is described."""
    limit = _MAX_MEAN_BIAS.get(dtype)
    if limit is None:
        return None
    use = want.isfinite() & (want.abs() > 1e-3)
    if int(use.sum()) < _MIN_ELEMENTS:
        return None
    off = ((got.abs() - want.abs()) / want.abs()).clamp(-0.02, 0.02).where(use, 0.0)
    lean = float(off.sum() / use.sum())
    if abs(lean) > limit:
        return f"results have a relative bias of {lean:+.2g} on average; is something rounded towards zero?"
    rows = (off.sum(-1) / use.sum(-1).clamp(min=1)).where(use.sum(-1) >= _MIN_ROW_WIDTH, 0.0)
    worst = float(rows.flatten()[rows.abs().argmax()])
    if abs(worst) <= limit * _ROW_BIAS_FRACTION:
        return None
    return f"a whole row has a relative bias of {worst:+.2g}; is a sum kept in {str(dtype).removeprefix('torch.')}?"


def bitwise_equal(a: Any, b: Any) -> bool:
    """Whether all tensors have equal bits; other objects count as equal."""
    if isinstance(a, (tuple, list)):
        return all(map(bitwise_equal, a, b))
    if not isinstance(a, torch.Tensor):
        return True
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().contiguous().view(-1).view(torch.uint8)


def shares_memory(made: torch.Tensor, given: Any) -> bool:
    """Whether two tensors, or a tensor and the data of a packed weight, share memory."""
    if isinstance(given, (tuple, list)):
        return any(shares_memory(made, each) for each in given)
    if not isinstance(given, torch.Tensor) or not made.numel() or not given.numel():
        return False
    return made.device == given.device and made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def join_problems(problems: Sequence[str], most: int = 4) -> str:
    """The first ``most`` problems, joined, and how many more there are."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join([*problems[:most], *more])
