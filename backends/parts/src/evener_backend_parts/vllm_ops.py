"""Kernels over custom ops that keep vLLM's names, which several vendors ship: norm, gated activation.

They are below portable kernels in priority, so that a device with Triton uses them only if the user names one.
"""

from __future__ import annotations

import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener_backend_parts.paged_library import HALF_DTYPES, PRIORITY
from evener_backend_parts.vendor_ops import VendorOps

#: Our activation → the vendor's op.
ACTIVATIONS = {
    "silu": "_C::silu_and_mul", "gelu": "_C::gelu_and_mul", "gelu_tanh": "_C::gelu_tanh_and_mul",
}  # fmt: skip


def aligned(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """The tensor in one piece that starts at a multiple of ``alignment`` bytes: itself, or a copy. A view of a layer's
    activations starts anywhere."""
    whole = tensor.contiguous()
    return whole.clone() if whole.numel() and whole.data_ptr() % alignment else whole


class VendorKernel(Kernel):
    """One op of a vendor's package, in half precision.

    Args:
        ops: the package.
        prefix: of the kernel's name, such as "mcoplib".
        priority: see ``Kernel``.
        dtypes: compute dtypes that the vendor's op takes.
    """

    capturable = True

    def __init__(
        self, ops: VendorOps, prefix: str, priority: int = PRIORITY, dtypes: tuple[str, ...] = HALF_DTYPES
    ) -> None:
        self.ops, self.priority, self.dtypes = ops, priority, dtypes
        self.name = f"{prefix}.{self.op}"

    def supports(self, call: OpCall) -> str | None:
        dtype = call.static["dtype"]
        if dtype not in self.dtypes or dtype not in call.device.dtypes:
            return f"computes in {' or '.join(self.dtypes)}, not in {dtype} here"
        return self.refusal(call)

    def refusal(self, call: OpCall) -> str | None:
        """A reason against ``call`` other than its dtype."""
        raise NotImplementedError


class VendorNorm(VendorKernel):
    """``rms_norm`` without an offset on the weight."""

    op = "rms_norm"

    def refusal(self, call: OpCall) -> str | None:
        if call.static["offset"]:
            return f"multiplies by the weight itself, not by weight + {call.static['offset']}"
        return self.ops.refusal("_C::rms_norm", call.device.variant)

    def build(self, call: OpCall) -> OpFunction:
        norm, eps = self.ops.function("_C::rms_norm"), float(call.static["eps"])
        alignment = call.device.alignment

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            x = aligned(x, alignment)
            y = torch.empty_like(x)
            if y.numel():
                norm(result=y, input=x, weight=aligned(weight.to(x.dtype), alignment), epsilon=eps)
            return y

        return run

    def workspace(self, call: OpCall) -> int:
        # A copy of an input with strides, and of the weight.
        return 4 * (call.bucket.high + 1) * int(call.static["hidden"])


class VendorActAndMul(VendorKernel):
    """``act_and_mul`` where the gate comes first."""

    op = "act_and_mul"

    def refusal(self, call: OpCall) -> str | None:
        activation = call.static["activation"]
        if activation not in ACTIVATIONS:
            return f"has {', '.join(ACTIVATIONS)}, not {activation}"
        return self.ops.refusal(ACTIVATIONS[activation], call.device.variant)

    def build(self, call: OpCall) -> OpFunction:
        name = ACTIVATIONS[call.static["activation"]]
        function, inner = self.ops.function(name), int(call.static["inner"])

        # The first argument has different names in these schemas, but the same place.
        def run(x: torch.Tensor) -> torch.Tensor:
            y = x.new_empty(x.shape[0], inner)
            if y.numel():
                function(y, aligned(x, call.device.alignment))
            return y

        return run

    def workspace(self, call: OpCall) -> int:
        return 4 * call.bucket.high * 2 * int(call.static["inner"])
