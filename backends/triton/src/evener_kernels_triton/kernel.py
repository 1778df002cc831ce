"""The base class of this package's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener_kernels_triton.arguments import checked
from evener_kernels_triton.tuning import Tuning

#: Dtypes that the kernels compute in; a device may have fewer.
DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: Precision of products of float32 numbers: full float32, not TF32.
PRECISION = "ieee"


def _with_checks(build: Callable[[Any, OpCall], OpFunction]) -> Callable[[Any, OpCall], OpFunction]:
    @wraps(build)
    def built(self: Any, call: OpCall) -> OpFunction:
        return checked(call, build(self, call))

    return built


class TritonKernel(Kernel):
    """A kernel of this package: it can be captured, refuses dtypes that the device lacks, and what it builds checks the
    arguments of its first call (``arguments.checked``)."""

    priority = 100
    capturable = True

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "build" in vars(cls):
            cls.build = _with_checks(cls.build)  # type: ignore[method-assign, assignment]

    def __init__(self, device: Device, tuning: Tuning) -> None:
        self.device, self.tuning = device, tuning
        self.name = "triton." + self.op

    def supports(self, call: OpCall) -> str | None:
        dtype = call.static.get("dtype")
        if dtype is not None and (dtype not in DTYPES or dtype not in call.device.dtypes | call.device.emulated):
            return f"does not compute in {dtype} here"
        return self._unsupported_reason(call)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        """(optional) A reason against ``call`` other than its dtype."""
        del call
        return None


def rotation_refusal(dim: int, size: int) -> str | None:
    """Why no launch may rotate ``dim`` dimensions of heads that are ``size`` wide; None if one may."""
    if dim % 2 or not 0 <= dim <= size:
        return f"rotates pairs within heads; {dim} of {size} dimensions are none"
    return None
