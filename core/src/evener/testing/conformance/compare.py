"""Comparing what was computed with what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Largest mean error, with its sign, that rounding to nearest leaves; rounding towards zero leaves half as much again.
_LEAN = {torch.bfloat16: 2**-10, torch.float16: 2**-13}
_ENOUGH = 2000
#: A row may lean by this part of that: a factor on it as a whole, from a sum that was rounded, averages out over rows.
_ROW, _WIDE = 1 / 4, 1000


def difference(
    got: torch.Tensor, want: torch.Tensor, tolerance: Mapping[str, tuple[float, float]], dtype: str,
    nearest: bool = True,
) -> str | None:  # fmt: skip
    """What is wrong with a result; None if shapes agree, integers are equal and the rest is within tolerance, and, if
    ``nearest``, errors lie to both sides."""
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)}, not {list(want.shape)}"
    if not want.is_floating_point():
        wrong = got.to(torch.int64) != want.to(torch.int64)
        return _where(got, want, wrong, "") if wrong.any() else None
    relative, absolute = tolerance[dtype]
    have, right = got.double(), want.double()
    close = torch.isclose(have, right, rtol=relative, atol=absolute, equal_nan=True)
    if not close.all():
        allowed = f"; allowed are {relative:g} of it and {absolute:g}"
        return _where(have, right, ~close, allowed) + scaled(have, right, relative)
    return _leaning(have, right, got.dtype) if nearest else None


def scaled(got: torch.Tensor, want: torch.Tensor, relative: float) -> str:
    """The one factor, if there is one, on everything that was computed; the least squares' one."""
    have, right = got.double().flatten(), want.double().flatten()
    use = have.isfinite() & right.isfinite()
    length = float(right[use] @ right[use])
    if not use.all() or len(have) < 2 or not length:
        return ""
    by = float(have @ right) / length
    left = have - by * right
    # One element that is far off is no factor on all: what is left may be no more than rounding leaves.
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


def _leaning(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Rounding to nearest errs to both sides."""
    limit = _LEAN.get(dtype)
    if limit is None:
        return None
    use = want.isfinite() & (want.abs() > 1e-3)
    if int(use.sum()) < _ENOUGH:
        return None
    off = ((got.abs() - want.abs()) / want.abs()).clamp(-0.02, 0.02).where(use, 0.0)
    lean = float(off.sum() / use.sum())
    if abs(lean) > limit:
        return f"results are off by {lean:+.2g} of their size on average; is something rounded towards zero?"
    rows = (off.sum(-1) / use.sum(-1).clamp(min=1)).where(use.sum(-1) >= _WIDE, 0.0)
    worst = float(rows.flatten()[rows.abs().argmax()])
    if abs(worst) <= limit * _ROW:
        return None
    return f"a whole row is off by {worst:+.2g} of its size; is a sum kept in {str(dtype).removeprefix('torch.')}?"


def same(a: Any, b: Any) -> bool:
    """Equal bits; things that are no tensors count as equal."""
    if isinstance(a, (tuple, list)):
        return all(map(same, a, b))
    if not isinstance(a, torch.Tensor):
        return True
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().contiguous().view(-1).view(torch.uint8)


def overlaps(made: torch.Tensor, given: Any) -> bool:
    """Whether two tensors, or a tensor and what a packing made, share memory."""
    if isinstance(given, (tuple, list)):
        return any(overlaps(made, each) for each in given)
    if not isinstance(given, torch.Tensor) or not made.numel() or not given.numel():
        return False
    return made.device == given.device and made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def joined(problems: Sequence[str], most: int = 4) -> str:
    """Problems in one text."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join([*problems[:most], *more])
