"""What ``lean_interpreter`` leaves out of Triton's interpreter changes no result."""

from __future__ import annotations

import interpreted  # noqa: F401  (repairs the interpreter)
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter


def test_every_bfloat16_is_widened_as_torch_does_and_narrowed_by_cutting_off() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    wide = interpreter._convert_float(bits, tl.bfloat16, tl.float32, None).view(np.float32)
    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(wide.view(np.uint32), want.view(np.uint32))
    between = (want.view(np.uint32) | 0xFFFF).view(np.float32).T
    narrow = interpreter._convert_float(between, tl.float32, tl.bfloat16, None)
    assert np.array_equal(narrow, bits.T)


@triton.jit
def outer_kernel(x, y, count, WIDE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at, across = tl.arange(0, SIZE), tl.arange(0, WIDE)
    found = tl.load(x + at)[:, None] * across[None, :] + count
    tl.store(y + at[:, None] * WIDE + across[None, :], found + tl.load(x + at)[:, None])


def test_values_of_different_shapes_are_widened_to_both() -> None:
    x = torch.arange(8.0)
    for wide in (4, 1, 8):
        y = torch.zeros(8, wide)
        outer_kernel[(1,)](x, y, 3, WIDE=wide, SIZE=8)
        assert torch.equal(y, x[:, None] * torch.arange(wide) + 3 + x[:, None])


@triton.jit
def mismatch_kernel(y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(y + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


def test_shapes_that_do_not_fit_together_still_raise() -> None:
    for _ in range(2):  # the second time, too
        with pytest.raises(Exception, match="incompatible dimensions at index 0: 8 and 16"):
            mismatch_kernel[(1,)](torch.zeros(16), SIZE=8)
