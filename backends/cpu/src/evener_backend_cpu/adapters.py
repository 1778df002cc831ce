"""Adapters: the rows of each are multiplied together, by the kernels of linear layers."""

from __future__ import annotations

from itertools import accumulate

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener_backend_cpu.arguments import require
from evener_backend_cpu.primitives import NativeKernel

#: Products of two numbers: for fewer, threads take longer to meet than to multiply.
_SHARED_WORK = 1 << 20


class NativeAdapters(NativeKernel):
    """Only adapters that a row has are read. Every number of rows gives a row the same bits."""

    op = "add_adapters"

    def build(self, call: OpCall) -> OpFunction:
        static, device = call.static, self.device
        dtype, narrow = getattr(torch, static["dtype"]), static["dtype"] != "float32"
        linear = self.native.function("linear_wide" if narrow else "linear", static["dtype"])
        rank, slots, columns = static["rank"], static["slots"], static["columns"]
        spans = tuple(zip(static["parts"], accumulate(static["parts"]), strict=True))

        def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            rows, y = len(x), torch.empty(len(x), len(matrix))
            threads = device.threads if rows * matrix.numel() >= _SHARED_WORK else 1
            linear(x.data_ptr(), rows, matrix.data_ptr(), None, None, *matrix.shape, y.data_ptr(), threads)
            return y

        def second(inner: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            if not narrow:
                return product(inner, matrix)
            # Rounding the few numbers between the matrices would bias whole rows, so what is cut off counts too.
            upper = inner.to(dtype)
            both = product(torch.cat([upper, (inner - upper).to(dtype)]), matrix)
            return both[: len(inner)] + both[len(inner) :]

        def run(
            y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, index: torch.Tensor
        ) -> torch.Tensor:
            require("the first matrices", down, dtype, (slots, len(spans) * rank, columns))
            require("the second matrices", up, dtype, (slots, static["rows"], rank))
            if {x.dtype, y.dtype} != {dtype} or not len(x) == len(y) == len(index) or x.shape[1] != columns:
                shapes = f"{x.dtype} {list(x.shape)}, {y.dtype} {list(y.shape)}, index {list(index.shape)}"
                raise ValueError(f"{shapes}; the kernel was built for equally many rows of {dtype}, {columns} columns")
            used = index.unique().tolist()
            if used and not -1 <= used[0] <= used[-1] < slots:
                raise ValueError(f"the index has {used[0]} to {used[-1]}; there are {slots} adapters")
            for slot in used:
                if slot < 0:
                    continue
                own = None if len(used) == 1 else (index == slot).nonzero().flatten()
                inner = product((x if own is None else x.index_select(0, own)).contiguous(), down[slot])
                for part, (rows, end) in enumerate(spans):
                    piece = inner[:, part * rank : (part + 1) * rank].contiguous()
                    added = second(piece, up[slot, end - rows : end])
                    place = y[:, end - rows : end]
                    if own is None:
                        place.copy_(place + added)
                    else:  # an index and a slice together would be followed for each number
                        place.index_copy_(0, own, (place.index_select(0, own) + added).to(dtype))
            return y

        return run
