"""What all kernels of this package share."""

from __future__ import annotations

from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall
from evener_kernels_triton.tuning import Tuning

#: Types that the kernels compute in; a device may have fewer.
DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: What a product of two float32 numbers keeps of them: everything.
PRECISION = "ieee"


class TritonKernel(Kernel):
    """A kernel of this package: it may be captured, and refuses types that the device lacks."""

    priority = 100
    capturable = True

    def __init__(self, device: Device, tuning: Tuning) -> None:
        self.device, self.tuning = device, tuning
        self.name = "triton." + self.op

    def supports(self, call: OpCall) -> str | None:
        dtype = call.static.get("dtype")
        if dtype is not None and (dtype not in DTYPES or dtype not in call.device.dtypes | call.device.emulated):
            return f"does not compute in {dtype} here"
        return self._judge(call)

    def _judge(self, call: OpCall) -> str | None:
        """(optional) A reason against ``call`` beside its type."""
        del call
        return None
