"""The devices of ``reference.backend``: a plain one, and one that delays results and raises on early reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evener.contracts.device import Device, DeviceCapabilities, MemoryInfo, Readback, ReadyReadback
from evener.contracts.hooks import hookimpl
from evener.errors import EngineError

_POISON = -0x5A5A5A5
_ATEN = torch.ops.aten
#: Ops that make a step wait for the device, because the shape of their result or a Python value depends on its data.
#: In inference mode a composite torch op is dispatched as one op, so these are listed too.
_SYNCHRONIZING = {
    _ATEN._local_scalar_dense.default,
    _ATEN.item.default,
    _ATEN.is_nonzero.default,
    _ATEN.equal.default,
    _ATEN.allclose.default,
    _ATEN.nonzero.default,
    _ATEN.nonzero_numpy.default,
    _ATEN.argwhere.default,
    _ATEN.where.default,
    _ATEN.masked_select.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default,
    _ATEN.bincount.default,
    _ATEN.tensor_split.tensor_indices_or_sections,
}
#: Methods that give values to Python. Tensors in host memory need no op for them, so a dispatch mode does not see them.
_HOST_READ_METHODS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.item,
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
}
_REPEATS = {_ATEN.repeat_interleave.Tensor, _ATEN.repeat_interleave.self_Tensor}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_REPEATING = {torch.repeat_interleave, torch.Tensor.repeat_interleave}
_CHOOSING = {torch.where, torch.Tensor.where}
#: Functions of torch and methods of tensors that always call a synchronizing op.
_SYNCHRONIZING_CALLS = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("allclose", "argwhere", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "unique",
                 "unique_consecutive")
    if hasattr(owner, name)
}  # fmt: skip
#: What is looked at more closely: every call of a step comes by, and most need one lookup. Ops are known by identity,
#: because torch computes their hash in Python.
_LOOKED_AT = {id(op) for op in (*_SYNCHRONIZING, *_REPEATS, _ATEN.index.Tensor, _ATEN.index_put_.default)}
_CALLS_LOOKED_AT = _HOST_READ_METHODS | _SYNCHRONIZING_CALLS | _INDEXING | _REPEATING | _CHOOSING
#: Looking at each op takes as long as the step itself, and steps are alike: of an engine's steps these are looked at
#: in full, the first ones and then one of so many. Calls from Python are looked at in every step.
_FIRST_IN_FULL, _THEN_ONE_OF = 4, 8


class HostDevice(Device):
    """Host memory; every result is ready at once."""

    simulated = True

    def __init__(self, index: int) -> None:
        self.name, self.index = "reference host", index
        self.torch_device = torch.device("cpu")
        self.capabilities = DeviceCapabilities(
            dtypes=frozenset({"float32", "bfloat16", "float16"}), alignment=64, int64=True, host_memory=True
        )

    def select(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def memory(self) -> MemoryInfo:
        return MemoryInfo(8 << 30, 8 << 30)

    def readback(self, tensor: torch.Tensor) -> Readback:
        return ReadyReadback(tensor.clone())

    def limit_threads(self, count: int) -> None:
        torch.set_num_threads(count)


class ForbidHostReads(TorchDispatchMode):
    """While active, an op that needs a value on the host raises."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without this torch imports its compiler (two seconds), only to disable it here. Nothing is compiled here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if id(func) in _LOOKED_AT and (func in _SYNCHRONIZING or _needs_host_count(func, args, kwargs)):
            raise EngineError(f"{func} reads a value on the host during a step")
        return func(*args, **kwargs)


def _needs_host_count(func: Any, args: Any, kwargs: Any) -> bool:
    """Indexing by a mask, and repeats by a tensor without ``output_size``, need a count from the device."""
    if func is _ATEN.index.Tensor or func is _ATEN.index_put_.default:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return func in _REPEATS and kwargs.get("output_size") is None


def _indexed_by_values(index: Any) -> bool:
    """A slice between tensors, or a mask."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        any(isinstance(e, torch.Tensor) for e in (i.start, i.stop, i.step)) if isinstance(i, slice)
        else isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
        for i in parts
    )  # fmt: skip


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of one of ``_CALLS_LOOKED_AT`` needs a value on the host."""
    if func in _INDEXING:
        return _indexed_by_values(args[1])
    if func in _REPEATING:
        repeats = kwargs["repeats"] if "repeats" in kwargs else args[:2][-1]
        return kwargs.get("output_size") is None and isinstance(repeats, torch.Tensor)
    return func not in _CHOOSING or len(args) + len(kwargs) == 1


class _ForbidReadingCalls(TorchFunctionMode):
    """While active, a call from Python that reads a value of a tensor raises."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CALLS_LOOKED_AT and _reads(func, args, kwargs or {}):
            raise EngineError(f"{func.__name__} of a tensor reads a value on the host during a step")
        return func(*args, **(kwargs or {}))


class DelayedReadback(Readback):
    """A late result: its buffer is poison until ``wait``; ``ready`` is True once more work was submitted."""

    def __init__(self, device: DelayedDevice, tensor: torch.Tensor) -> None:
        self._device, self._value = device, tensor.clone()
        self._submitted_at = device.submitted
        self.seen = torch.full_like(tensor, _POISON)
        if tensor.numel():
            tensor.fill_(_POISON)

    def ready(self) -> bool:
        return self._device.submitted > self._submitted_at

    def wait(self) -> torch.Tensor:
        if self._device.stepping:
            raise EngineError("a result was read while a step was being submitted")
        self.seen = self._value
        return self.seen


class DelayedDevice(HostDevice):
    """Host memory whose results are late; see ``DelayedReadback``.

    Attributes:
        submitted: uploads so far, at least one for each step.
        steps: how many have begun.
        stepping: True inside ``step``.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.submitted = self.steps = 0
        self.stepping = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the submission of a step: code that reads a value on the host, or waits, raises ``EngineError``."""
        self.stepping, self.steps = True, self.steps + 1
        in_full = self.steps <= _FIRST_IN_FULL or self.steps % _THEN_ONE_OF == 0
        try:
            with _ForbidReadingCalls(), ForbidHostReads() if in_full else nullcontext():  # type: ignore[no-untyped-call]
                yield
        finally:
            self.stepping = False

    def upload(self, array: Any) -> torch.Tensor:
        self.submitted += 1
        return super().upload(array)

    def readback(self, tensor: torch.Tensor) -> Readback:
        return DelayedReadback(self, tensor)


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The plain device or, with ``delay``, the asynchronous one."""
    return DelayedDevice(index) if options["delay"] else HostDevice(index)
