"""Layer norms of rows, in one launch."""

from __future__ import annotations

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.rows import layer_norm_kernel
from evener_kernels_triton.kernel import TritonKernel
from evener_kernels_triton.tuning import Tuning, memoized, power_of_two


class TritonLayerNorm(TritonKernel):
    """One program for each row; the deviations are summed after the mean is known, as the reference does."""

    op = "layer_norm"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        tuning, size, eps = self.tuning, call.static["hidden"], call.static["eps"]

        def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
            rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, size)
            y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
            if y.numel():
                _launch(tuning, size, eps, weight is not None, bias is not None)(
                    (rows.shape[0], 1, 1), rows, y if weight is None else weight, y if bias is None else bias, y,
                    rows.stride(0),
                )  # fmt: skip
            return y.view(x.shape)

        return run


@memoized
def _launch(tuning: Tuning, size: int, eps: float, weighted: bool, biased: bool) -> PreparedLaunch:
    block = power_of_two(size)
    return PreparedLaunch(
        layer_norm_kernel, size=size, eps=eps, WEIGHTED=weighted, BIASED=biased, BLOCK=block, OVERLAP=tuning.overlap,
        num_warps=max(1, min(16, block // 512)), **tuning.launch,
    )  # fmt: skip
