"""Layer norms, by torch's kernel: one pass over each row, where the reference takes eight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from evener.contracts.ops import OpCall, OpFunction
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.primitives import NativeKernel


def layer_norm(hidden: int, eps: float) -> OpFunction:
    """The op ``layer_norm`` over rows of ``hidden`` numbers; results have the dtype of the input."""

    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        gain, added = (None if each is None else each.float() for each in (weight, bias))
        return F.layer_norm(x.float(), (hidden,), gain, added, eps).to(x.dtype)

    return run


class LayerNorm(NativeKernel):
    """Layer norms, computed in float32."""

    op = "layer_norm"

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device)
        self.name = "torch_layer_norm"

    def build(self, call: OpCall) -> OpFunction:
        return layer_norm(call.static["hidden"], call.static["eps"])
