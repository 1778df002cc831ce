"""This package's kernels as a host device gets them, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
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


def _make_bf16_constants() -> None:
    """Before 3.7 there are none: a kernel that chooses between a bfloat16 and a number of its own finds no builder."""
    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):
        interpreter.InterpreterBuilder.get_bf16 = lambda self, value: self.create_fp_trunc(
            self.get_fp32(value), interpreter.tl.bfloat16
        )


def _read_loop_bounds() -> None:
    """Before 3.7 a bound that was loaded, an array of one number, is given to ``int``: numpy 2.4 refuses it."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)  # what is set below goes with the rest when the launch ends
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


class _Checked:
    """The interpreter's memory, where a launch reaches nothing but the tensors it was given: what a device answers with
    an error that ends the process, or with nothing at all, raises here."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._name, self._starts, self._stops = "", np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def launch(self, name: str, tensors: list[torch.Tensor]) -> None:
        """From here on ``tensors`` are reached, from the first element of each to its last."""
        ends = {t: sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors if t.numel()}
        spans = sorted((t.data_ptr(), t.data_ptr() + t.itemsize * (last + 1)) for t, last in ends.items())
        joined: list[list[int]] = []
        for start, stop in spans:
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(stop, joined[-1][1])
            else:
                joined.append([start, stop])
        self._name = name
        self._starts, self._stops = np.array(joined, dtype=np.uint64).reshape(-1, 2).T

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._look("reads", ptrs, mask, np.dtype(dtype).itemsize)
        return self._memory.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self._look("writes", ptrs, mask, value.itemsize)
        return self._memory.store(ptrs, value, mask)

    def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, order: Any) -> Any:
        self._look("changes", ptrs, mask, value.itemsize)
        return self._memory.atomic_rmw(op, ptrs, value, mask, order)

    def _look(self, does: str, ptrs: Any, mask: Any, size: int) -> None:
        reached = np.broadcast_to(ptrs, np.shape(mask))[np.asarray(mask, dtype=bool)]
        if not reached.size:
            return
        if not self._starts.size:
            raise IndexError(f"{self._name} {does} memory, and no tensor that it was given has any")
        span = np.searchsorted(self._starts, reached, side="right").astype(np.int64) - 1
        outside = (span < 0) | (reached + np.uint64(size) > self._stops[np.maximum(span, 0)])
        if outside.any():
            first = int(reached[outside][0])
            after = first - int(self._stops[max(int(span[outside][0]), 0)])
            raise IndexError(
                f"{self._name} {does} {int(outside.sum())} of {reached.size} elements outside of the tensors that it "
                f"was given, the first {after} bytes behind the nearest one before it"
            )


@contextmanager
def every_access_checked() -> Iterator[None]:
    """Launches in here raise where they reach memory that is not their tensors'."""
    memory, prepare = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
    checked = _Checked(memory)

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        found = prepare(self, args, kwargs)
        checked.launch(self.fn.__name__, [a for a in (*found[0], *found[1].values()) if isinstance(a, torch.Tensor)])
        return found

    interpreter._interpreter, interpreter.GridExecutor._init_args_hst = checked, prepared
    try:
        yield
    finally:
        interpreter._interpreter, interpreter.GridExecutor._init_args_hst = memory, prepare


_widen_bf16_products()
_make_bf16_constants()
_read_loop_bounds()
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
