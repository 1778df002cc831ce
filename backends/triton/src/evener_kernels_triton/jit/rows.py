"""Kernels over rows: norms, activations, row picking, soft cap."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch


@triton.jit
def activate(x, ACT: tl.constexpr):
    """silu, gelu or gelu_tanh of float32."""
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(2.0 * inner)
    return y


@fast_launch
@triton.jit
def rms_norm_kernel(
    x, residual, post, weight, y, total,
    inner, x_outer, x_inner, residual_row, size, eps, offset,
    POST: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each row. Row ``r`` of x is at ``(r // inner) * x_outer + (r % inner) * x_inner``.

    With ADD the row is x + residual, which is also stored in ``total``; that may be the residual's own memory. POST: x
    is normed with the weight ``post`` first, and rounded as y is: what a launch for that alone would have stored.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    # A weight does not depend on the previous kernel, so it is loaded before the wait.
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    first = w
    if POST:
        first = tl.load(post + at, mask=inside, other=0.0).to(tl.float32) + offset
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + (row // inner) * x_outer + (row % inner) * x_inner + at, mask=inside, other=0.0).to(tl.float32)
    if POST:
        v = (v * tl.rsqrt(tl.sum(v * v, 0) / size + eps) * first).to(y.dtype.element_ty).to(tl.float32)
        # Without this, in float32 a compiler would make one operation of the product and the sum, which rounds once.
        v = tl.where(inside, v, 0.0)
    if ADD:
        v += tl.load(residual + row * residual_row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * size + at, v.to(total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(v * v, 0) / size + eps)
    tl.store(y + row * size + at, (v * scale * w).to(y.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def layer_norm_kernel(
    x, weight, bias, y, x_row, size, eps,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each row. Without WEIGHTED the weight is 1, without BIASED the bias is 0."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        # Also before the weights are loaded: with an offset they come from the kernel before.
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    w = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHTED:
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros((BLOCK,), tl.float32)
    if BIASED:
        added = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.where(inside, v - tl.sum(v, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(v * v, 0) / size + eps)
    tl.store(y + row * size + at, (v * scale * w + added).to(y.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def act_and_mul_kernel(x, y, x_row, inner, ACT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """act(x[:, :inner]) * x[:, inner:], BLOCK columns for each program."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * inner + at, (activate(gate, ACT) * up).to(y.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def take_rows_kernel(ids, table, y, table_row, size, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = table[ids[t]] * scale, BLOCK columns for each program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    source = tl.load(ids + row).to(tl.int64)
    v = tl.load(table + source * table_row + at, mask=inside)
    if SCALED:
        v = (v.to(tl.float32) * scale).to(v.dtype)
    tl.store(y + row * size + at, v, mask=inside)


@fast_launch
@triton.jit
def softcap_kernel(x, y, x_row, size, cap, BLOCK: tl.constexpr):
    """cap * tanh(x / cap), BLOCK columns for each program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    v = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32) / cap
    tl.store(y + row * size + at, (cap * (2.0 * tl.sigmoid(2.0 * v) - 1.0)).to(y.dtype.element_ty), mask=inside)
