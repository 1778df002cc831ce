"""This package's kernels as a host device gets them, under Triton's interpreter."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter

from evener.contracts.ops import Kernel, OpSchema
from evener.contracts.state import StateProvider
from evener.ops.schemas import BUILTIN
from evener.testing.reference_device import HostDevice
from evener_kernels_triton.plugin import evener_kernels, evener_state_providers


def _widen_bf16_products() -> None:
    """The interpreter multiplies the bits of bfloat16 as if they were integers."""
    create = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


_widen_bf16_products()
# A device's exponential is infinite without a word, and its quotients are not defined where nothing is stored.
np.seterr(over="ignore", invalid="ignore", divide="ignore")


@cache
def schemas() -> dict[str, OpSchema]:
    """The built-in ops by name."""
    return {schema.name: schema for schema in BUILTIN}


@cache
def _kernels() -> tuple[Kernel, ...]:
    return tuple(evener_kernels(HostDevice(0), {}))


def host_kernels(composite: bool) -> list[Kernel]:
    """Kernels of primitives, or of composites."""
    return [k for k in _kernels() if schemas()[k.op].composite == composite]


def host_states() -> list[StateProvider]:
    """The state providers."""
    return list(evener_state_providers(HostDevice(0), {}))
