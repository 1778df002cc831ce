"""Kernels for primitive ops on rows and heads."""

from __future__ import annotations

from typing import Any

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener_kernels_triton.jit.heads import rotary_kernel
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.rows import act_and_mul_kernel, rms_norm_kernel, softcap_kernel, take_rows_kernel
from evener_kernels_triton.kernel import ACTIVATIONS, TritonKernel, rotation_refusal
from evener_kernels_triton.tuning import Tuning, memoized, power_of_two

#: Columns of a program that works on parts of rows.
CHUNK = 1024


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x, copied if the elements of a row are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def norm_rows(
    tuning: Tuning, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float,
    dtype: torch.dtype, post: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Normed rows in ``dtype``; with a residual also the sum, written over the residual. x is [T, hidden] or [T, n,
    hidden]. With the weight ``post`` x is normed before it is added, and rounded to ``dtype``."""
    shape, strides = x.shape, x.stride()
    if strides[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    flat = len(shape) == 2
    y = torch.empty(shape, dtype=dtype, device=x.device)
    total = None if residual is None else residual.contiguous()
    rows = shape[0] if flat else shape[0] * shape[1]
    if rows and shape[-1]:
        _norm(tuning, shape[-1], eps, offset, total is not None, post is not None)(
            (rows, 1, 1), x, total if total is not None else x, post if post is not None else weight, weight, y,
            total if total is not None else y, 1 if flat else shape[1], strides[0], 0 if flat else strides[1],
        )  # fmt: skip
    return y, total


@memoized
def _norm(tuning: Tuning, size: int, eps: float, offset: float, add: bool, post: bool) -> PreparedLaunch:
    block = power_of_two(size)
    return PreparedLaunch(
        rms_norm_kernel, residual_row=size, size=size, eps=eps, offset=offset, POST=post, ADD=add, BLOCK=block,
        OVERLAP=tuning.overlap, num_warps=max(1, min(16, block // 512)), **tuning.launch,
    )  # fmt: skip


class TritonRmsNorm(TritonKernel):
    """One program for each row."""

    op = "rms_norm"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        tuning, eps, offset = self.tuning, call.static["eps"], call.static["offset"]

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            flat = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
            return norm_rows(tuning, flat, None, weight, eps, offset, x.dtype)[0].view(x.shape)

        return run


class TritonAddRmsNorm(TritonKernel):
    """One program for each row; the sum is written over the residual."""

    op = "add_rms_norm"
    batch_invariant = True

    def workspace(self, call: OpCall) -> int:
        # Normed rows need new memory, and a residual with a row stride is copied.
        size: int = getattr(torch, call.static["dtype"]).itemsize
        return int(call.bucket.high * call.static["hidden"] * (size + 4))

    def build(self, call: OpCall) -> OpFunction:
        tuning, eps, offset = self.tuning, call.static["eps"], call.static["offset"]

        def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, total = norm_rows(tuning, x, residual, weight, eps, offset, x.dtype)
            assert total is not None
            return y, total

        return run


class TritonRotary(TritonKernel):
    """Each program takes a few heads of one token."""

    op = "rotary"
    batch_invariant = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return rotation_refusal(call.static["rotary_dim"], call.static["head_dim"])

    def build(self, call: OpCall) -> OpFunction:
        s = call.static
        size, dim, interleaved = s["head_dim"], s["rotary_dim"], bool(s["interleaved"])
        wide = power_of_two(size)

        def turn(positions: torch.Tensor, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
            x = rows_of(x)
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if y.numel():
                rotary_kernel[(x.shape[0], -(-x.shape[1] // 4))](
                    positions, x, y, cos_sin, x.shape[1], x.stride(0), x.stride(1), y.stride(0), y.stride(1),
                    ROTARY=dim, INTERLEAVED=interleaved, D=size, DP=wide, H=4, num_warps=1,
                )  # fmt: skip
            return y

        def run(
            positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return turn(positions, query, cos_sin), turn(positions, key, cos_sin)

        return run


def act_rows(tuning: Tuning, x: torch.Tensor, inner: int, activation: str) -> torch.Tensor:
    """act(gate) * up of rows [T, 2 * inner]."""
    (tokens, wide), (x_row, apart) = x.shape, x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), wide
    y = torch.empty(tokens, inner, dtype=x.dtype, device=x.device)
    if tokens:
        _act(tuning, inner, activation)((tokens, -(-inner // CHUNK), 1), x, y, x_row)
    return y


@memoized
def _act(tuning: Tuning, inner: int, activation: str) -> PreparedLaunch:
    return PreparedLaunch(
        act_and_mul_kernel, inner=inner, ACT=activation, BLOCK=min(CHUNK, power_of_two(inner)),
        OVERLAP=tuning.overlap, num_warps=4, **tuning.launch,
    )  # fmt: skip


class TritonActAndMul(TritonKernel):
    """Activation and product in one pass."""

    op = "act_and_mul"
    batch_invariant = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        kind = call.static["activation"]
        return None if kind in ACTIVATIONS else f"does not know activation {kind!r}"

    def build(self, call: OpCall) -> OpFunction:
        tuning, inner, kind = self.tuning, call.static["inner"], call.static["activation"]

        def run(x: torch.Tensor) -> torch.Tensor:
            return act_rows(tuning, x, inner, kind)

        return run


def _take(ids: torch.Tensor, table: torch.Tensor, scale: float | None) -> torch.Tensor:
    table = rows_of(table)
    size = table.shape[1]
    y = torch.empty(ids.shape[0], size, dtype=table.dtype, device=table.device)
    if y.numel():
        take_rows_kernel[(ids.shape[0], -(-size // CHUNK))](
            ids, table, y, table.stride(0), size, scale if scale is not None else 1.0, SCALED=scale is not None,
            BLOCK=min(CHUNK, power_of_two(size)), num_warps=4,
        )  # fmt: skip
    return y


class TritonEmbedding(TritonKernel):
    """Rows of the table, scaled."""

    op = "embedding"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        dtype, factor = getattr(torch, call.static["dtype"]), call.static["scale"]
        # The original model rounds the factor to its compute dtype before multiplying.
        scale = None if factor == 1.0 else float(torch.tensor(factor, dtype=dtype).item())

        def run(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return _take(ids, table, scale)

        return run


class TritonTakeRows(TritonKernel):
    """Rows by index."""

    op = "take_rows"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        def run(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return _take(rows, x, None)

        return run


class TritonSoftcap(TritonKernel):
    """Elementwise."""

    op = "softcap"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        cap: Any = call.static["cap"]

        def run(x: torch.Tensor) -> torch.Tensor:
            x = rows_of(x)
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if y.numel():
                softcap_kernel[(x.shape[0], -(-x.shape[1] // CHUNK))](
                    x, y, x.stride(0), x.shape[1], float(cap), BLOCK=CHUNK, num_warps=4
                )
            return y

        return run


PRIMITIVES = (
    TritonRmsNorm,
    TritonAddRmsNorm,
    TritonRotary,
    TritonActAndMul,
    TritonEmbedding,
    TritonTakeRows,
    TritonSoftcap,
)
