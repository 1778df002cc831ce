"""Linear layers over plain weights: own kernels where reading the weights is the cost, the library's above that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.quant import PackedWeight
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.jit.linear import gemv_kernel, skinny_kernel, stream_kernel
from evener_kernels_triton.kernel import PRECISION, TritonKernel
from evener_kernels_triton.tuning import Product, Tuning
from evener_kernels_triton.variants import products


def stream(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, out: torch.dtype, *, bias: torch.Tensor | None = None,
    activation: str = "", residual: torch.Tensor | None = None, total: torch.Tensor | None = None,
    gain: torch.Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """One token [1, columns] to [1, rows], where ``Tuning.stream`` has sizes for it; see ``stream_kernel``."""
    halves = 2 if activation else 1
    rows, columns = weight.shape[0] // halves, weight.shape[1]
    p = tuning.stream(rows, columns, halves)
    assert p is not None, "the caller asked"
    y = torch.empty(1, rows, dtype=out, device=x.device)
    stream_kernel[(min(-(-rows // p.n), p.m * tuning.units),)](
        x, residual if residual is not None else x, total if total is not None else y, gain if gain is not None else x,
        weight, bias if bias is not None else x, y, rows, columns, eps, offset,
        ADD=residual is not None, NORM=gain is not None, BIAS=bias is not None, ACT=activation, BN=p.n, BK=p.k,
        OVERLAP=tuning.overlap, num_warps=p.warps, **tuning.launch,
    )  # fmt: skip
    return y


def gemv(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, out: torch.dtype, *, bias: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:  # fmt: skip
    """One token [1, columns] to [1, rows]."""
    halves = 2 if activation else 1
    rows, columns = weight.shape[0] // halves, weight.shape[1]
    if tuning.stream(rows, columns, halves) is not None:
        return stream(tuning, x, weight, out, bias=bias, activation=activation)
    p = tuning.gemv(rows, columns, halves)
    y = torch.empty(1, rows, dtype=out, device=x.device)
    gemv_kernel[(-(-rows // p.n),)](
        x, weight, bias if bias is not None else x, y, rows, columns,
        BIAS=bias is not None, ACT=activation, BN=p.n, BK=p.k, EVEN=rows % p.n == 0 and columns % p.k == 0,
        TWO=columns > p.k, OVERLAP=tuning.overlap, num_warps=p.warps, **tuning.launch,
    )  # fmt: skip
    return y


def skinny(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, out: torch.dtype, *, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """A few tokens [T, columns] to [T, rows]; see ``skinny_kernel``."""
    tokens, (rows, columns) = x.shape[0], weight.shape
    p = tuning.skinny(tokens, rows, columns, weight.element_size())
    y = torch.empty(tokens, rows, dtype=out, device=x.device)
    across, down, each, splits = _grid(p, tokens, rows, columns)
    parts, arrived = y, y
    if splits > 1:
        parts = torch.empty(across * down * splits, p.n, p.m, dtype=torch.float32, device=x.device)
        arrived = tuning.arrivals.of(x.device, across * down)
    skinny_kernel[(across, down, splits)](
        x, weight, bias if bias is not None else x, y, parts, arrived, tokens, rows, columns, x.stride(0), y.stride(0),
        each, BIAS=bias is not None, SPLITS=splits, BM=p.m, BN=p.n, BK=p.k,
        EVEN=rows % p.n == 0 and columns % p.k == 0, PRECISION=PRECISION, OVERLAP=tuning.overlap,
        num_warps=p.warps, num_stages=p.stages, **tuning.launch,
    )  # fmt: skip
    return y


def _grid(p: Product, tokens: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Tiles of rows and of tokens, columns of a span, and how many spans there are."""
    each = -(-columns // (p.splits * p.k)) * p.k
    return -(-rows // p.n), -(-tokens // p.m), each, -(-columns // each)


def partial_sums(tuning: Tuning, call: OpCall, rows: int, columns: int) -> int:
    """Bytes of what ``few`` adds up for the tokens of ``call``, where it is what serves them."""
    tokens = call.bucket.high
    if tokens == 1 or not tuning.few(tokens, rows):
        return 0
    p = tuning.skinny(tokens, rows, columns, getattr(torch, call.static["dtype"]).itemsize)
    across, down, _, splits = _grid(p, tokens, rows, columns)
    return across * down * splits * p.n * p.m * 4 if splits > 1 else 0


def few(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, out: torch.dtype, *, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """``gemv`` or ``skinny``, by the number of tokens."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0], dtype=out)
    return (gemv if x.shape[0] == 1 else skinny)(tuning, x, weight, out, bias=bias)


def many(x: torch.Tensor, weight: torch.Tensor, out: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The library's product, for any number of tokens; sums in ``out`` are not rounded before."""
    if x.dtype == out:
        return F.linear(x, weight, bias)
    y = torch.mm(x, weight.t(), out_dtype=out)
    return y if bias is None else y.add_(bias)


class TritonLinear(TritonKernel):
    """Few tokens: a stream of weight rows."""

    op = "linear"
    priority = 110
    packings = (PLAIN,)

    def _judge(self, call: OpCall) -> str | None:
        few = self.tuning.few(call.bucket.high, call.static["rows"])
        return None if few else f"is slower than the library at {call.bucket.high} tokens"

    def workspace(self, call: OpCall) -> int:
        return partial_sums(self.tuning.varied(call.variant), call, call.static["rows"], call.static["columns"])

    def variants(self, call: OpCall) -> Sequence[Variant]:
        return products(self.tuning, call, call.static["rows"], call.static["columns"])

    def build(self, call: OpCall) -> OpFunction:
        tuning = self.tuning.varied(call.variant)
        out = getattr(torch, call.static.get("out", call.static["dtype"]))

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            return few(tuning, x, weight.data, out, bias=bias)

        return run


class LibraryLinear(TritonKernel):
    """Many tokens: torch's own product, which calls the vendor's library."""

    op = "linear"
    priority = 100
    packings = (PLAIN,)

    def __init__(self, device: Any, tuning: Tuning) -> None:
        super().__init__(device, tuning)
        self.name = "torch.linear"

    def _judge(self, call: OpCall) -> str | None:
        out = call.static.get("out", call.static["dtype"])
        if call.device.host_memory and out != call.static["dtype"]:
            return f"torch has no product in {call.static['dtype']} with sums in {out} on the host"
        return None

    def build(self, call: OpCall) -> OpFunction:
        out = getattr(torch, call.static.get("out", call.static["dtype"]))

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            return many(x, weight.data, out, bias)

        return run


LINEAR = (TritonLinear, LibraryLinear)
