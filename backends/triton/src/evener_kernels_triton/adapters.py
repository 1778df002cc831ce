"""Adapters of linear weights."""

from __future__ import annotations

from itertools import accumulate

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener_kernels_triton.jit.adapters import adapters_down_kernel, adapters_up_kernel
from evener_kernels_triton.kernel import PRECISION, TritonKernel
from evener_kernels_triton.primitives import rows_of
from evener_kernels_triton.tuning import power_of_two

#: Rows of a program: as few as products of matrices take, so that few adapters meet in one.
_ROWS = 16
#: The largest rank whose numbers one program holds beside a tile of the result.
_MAX_RANK = 128


class TritonAdapters(TritonKernel):
    """One launch for the first matrices of all parts, then one for each part. The sizes of the tiles do not depend on
    the number of rows, so a row's result does not either."""

    op = "add_adapters"
    batch_invariant = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        rank = call.static["rank"]
        return None if rank <= _MAX_RANK else f"takes ranks up to {_MAX_RANK}, not {rank}"

    def workspace(self, call: OpCall) -> int:
        # The values between the two matrices; rows with a stride are copied.
        static = call.static
        size: int = getattr(torch, static["dtype"]).itemsize
        return int(call.bucket.high * (4 * static["inner"] + size * static["columns"]))

    def build(self, call: OpCall) -> OpFunction:
        static = call.static
        slots, rank, rows, width = static["slots"], static["rank"], static["rows"], static["inner"]
        spans = tuple(zip(static["parts"], accumulate(static["parts"]), strict=True))
        wide = max(16, min(64, power_of_two(width)))

        def run(
            y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, index: torch.Tensor
        ) -> torch.Tensor:
            x, y, tokens = rows_of(x), rows_of(y), x.shape[0]
            if not tokens:
                return y
            inner = torch.empty(tokens, width, dtype=torch.float32, device=x.device)
            tiles = -(-tokens // _ROWS)
            adapters_down_kernel[(tiles, -(-width // wide))](
                x, down, index, inner, tokens, x.stride(0), x.shape[1], width,
                SLOTS=slots, BM=_ROWS, BN=wide, BK=64, PRECISION=PRECISION, num_warps=4,
            )  # fmt: skip
            for part, (count, end) in enumerate(spans):
                adapters_up_kernel[(tiles, -(-count // 64))](
                    y, inner, up, index, tokens, y.stride(0), width, rows, end - count, end, part * rank,
                    SLOTS=slots, RANK=rank, BM=_ROWS, BN=64, BR=max(16, power_of_two(rank)), PRECISION=PRECISION,
                    num_warps=4,
                )  # fmt: skip
            return y

        return run


ADAPTERS = (TritonAdapters,)
