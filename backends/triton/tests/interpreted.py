"""This package's kernels as a host device gets them, under Triton's interpreter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from lean_interpreter import make_lean

from evener.contracts.ops import Kernel, OpSchema
from evener.contracts.state import StateProvider
from evener.ops.schemas import BUILTIN
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.plugin import evener_kernels, evener_state_providers

#: What a device takes along the second and the third axis of a grid.
_MOST_PROGRAMS = 65535


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


def _compare_as_devices_do() -> None:
    """Of numbers and what is none the interpreter names the largest number. A device compares pairs and keeps the
    second of a pair without an order: of a row, from left to right, the best behind the last that is no number."""
    usual = interpreter.ReduceOps.min_max

    def place(row: Any) -> int:
        none = np.flatnonzero(np.isnan(row))
        start = int(none[-1]) + 1 if len(none) else 0
        return min(len(row) - 1, start + (int(np.argmax(row[start:])) if start < len(row) else 0))

    def min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        one = input[0] if isinstance(input, tuple) else input
        data = one.handle.data
        if idx_reduce_op is not np.nanargmax or data.dtype.kind != "f" or not np.isnan(data).any():
            return usual(self, input, val_reduce_op, idx_reduce_op)
        places = np.expand_dims(np.apply_along_axis(place, self.axis, data), self.axis)
        found = np.take_along_axis(data, places, self.axis)
        if not self.keep_dims:
            places, found = places.squeeze(self.axis), found.squeeze(self.axis)
        return self.to_tensor(found, one.dtype), self.to_tensor(places.astype(np.int32), interpreter.tl.int32)

    interpreter.ReduceOps.min_max = min_max


def _start_in_order() -> None:
    """Programs run one after another, so none waits for the kernel before it."""
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None


def _run_backwards() -> None:
    """A device runs programs in any order. The last one comes first here: what a program stores behind its own part
    stays, while from first to last the next program would store the right numbers over it."""
    place = interpreter.InterpreterBuilder.set_grid_idx

    def mirrored(self: Any, *at: int) -> None:
        place(self, *(n - 1 - i for n, i in zip(self.grid_dim, at, strict=True)))

    interpreter.InterpreterBuilder.set_grid_idx = mirrored


class _CheckedMemory:
    """The interpreter's memory, where a launch reaches nothing but the tensors it was given: what a device answers with
    an error that ends the process, or with nothing at all, raises here. So does an address between two elements."""

    def __init__(self, memory: Any, others: Sequence[torch.Tensor]) -> None:
        self._memory, self._others = memory, others
        self._name, self._starts, self._stops = "", np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        #: Programs of each kernel that was launched.
        self.programs: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def launch(self, name: str, grid: Any, given: list[torch.Tensor]) -> None:
        """From here on the kernel may reach the tensors ``given``, from the first element of each to its last."""
        programs = math.prod(grid)
        if not 0 < programs < 1 << 31 or max(grid[1:], default=0) > _MOST_PROGRAMS:
            raise IndexError(f"{name} is launched with {' x '.join(map(str, grid))} programs")
        self.programs[name] += programs
        tensors = [t for t in (*given, *self._others) if t.numel()]
        ends = {t: sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors}
        spans = sorted((t.data_ptr(), t.data_ptr() + t.itemsize * (last + 1)) for t, last in ends.items())
        joined: list[list[int]] = []
        for start, stop in spans:
            if joined and start < joined[-1][1]:
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
        taken = np.asarray(mask, dtype=bool)
        reached = np.broadcast_to(ptrs, np.shape(mask))
        reached = reached if taken.all() else reached[taken]
        if not reached.size:
            return
        if not self._starts.size:
            raise IndexError(f"{self._name} {does} memory, and no tensor that it was given has any")
        if (reached & np.uint64(size - 1)).any():
            raise IndexError(f"{self._name} {does} elements of {size} bytes that do not begin at a multiple of {size}")
        low, high = reached.min(), reached.max()
        at = int(np.searchsorted(self._starts, low, side="right")) - 1
        if at >= 0 and high + np.uint64(size) <= self._stops[at]:
            return  # most accesses stay in one tensor, and this is faster
        reached = reached.ravel()
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
def every_access_checked(*others: torch.Tensor) -> Iterator[Counter[str]]:
    """Launches in here raise where they reach memory that is neither their tensors' nor that of ``others``, whose
    addresses they find in their tensors; and where a device takes no grid like theirs. Gives the programs of each
    kernel."""
    memory, prepare = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
    checked = _CheckedMemory(memory, others)

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        found = prepare(self, args, kwargs)
        given = [a for a in (*found[0], *found[1].values()) if isinstance(a, torch.Tensor)]
        checked.launch(self.fn.__name__, self.grid, given)
        return found

    interpreter._interpreter, interpreter.GridExecutor._init_args_hst = checked, prepared
    try:
        yield checked.programs
    finally:
        interpreter._interpreter, interpreter.GridExecutor._init_args_hst = memory, prepare


@contextmanager
def last_programs_alone() -> Iterator[None]:
    """Of each launch in here only the last program runs, the one with the largest offsets: it comes first."""
    call, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        whole = (*self.grid, 1, 1)[:3]
        builder.set_grid_dim = lambda *one: type(builder).set_grid_dim(builder, *whole)
        self.grid = (1,)
        try:
            call(self, *args, **kwargs)
        finally:
            del builder.set_grid_dim

    interpreter.GridExecutor.__call__ = alone
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = call


_widen_bf16_products()
_make_bf16_constants()
_read_loop_bounds()
_start_in_order()
_run_backwards()
_compare_as_devices_do()
make_lean()
# A device's exponential is infinite without a word, and its quotients are not defined where nothing is stored.
np.seterr(over="ignore", invalid="ignore", divide="ignore")


@cache
def schemas() -> dict[str, OpSchema]:
    """The built-in ops by name."""
    return {schema.name: schema for schema in BUILTIN}


class LargeDevice(HostDevice):
    """The host, with the launches of a large device: what the sizes of tiles depend on."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        features = frozenset({"units:132", f"shared:{227 << 10}", "overlap"})
        self.capabilities = replace(self.capabilities, features=features)


@cache
def _kernels(device: type[HostDevice]) -> tuple[Kernel, ...]:
    return tuple(evener_kernels(device(0), {}))


def host_kernels(composite: bool, device: type[HostDevice] = HostDevice) -> list[Kernel]:
    """Kernels of primitives, or of composites."""
    return [k for k in _kernels(device) if schemas()[k.op].composite == composite]


def host_states(device: type[HostDevice] = HostDevice) -> list[StateProvider]:
    """The state providers."""
    return list(evener_state_providers(device(0), {}))
