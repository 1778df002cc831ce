"""Recording torch calls over fixed addresses, and running them again as a device's graph does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evener.contracts.graph import GraphCapture, Replay
from evener.errors import EngineError
from evener_conformance.graph.nested import mapped, tensors
from evener_conformance.reference.device import ForbidHostReads

#: Value that a capture leaves in the integer tensors that it made; floats become NaN.
_POISON = 99


class Baked(Protocol):
    """Host numbers that a recorded call has fixed; a replay must be given new ones."""

    def refresh(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Set the lengths of the step that is replayed next."""


@dataclass(frozen=True)
class _RecordedOutput:
    """An output of an earlier call."""

    index: int


class _ExternalTensor:
    """A tensor that the segment did not make. Its memory is not kept alive, as a real graph does not keep it either."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
        self._address, self._dtype = tensor.data_ptr(), tensor.dtype
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> torch.Tensor:
        """The memory as it is now.

        Raises:
            EngineError: it was freed or moved.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise EngineError(f"a replay reads memory that was freed since capture: {self._dtype} {self._view[1]}")
        found = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)
        if found.data_ptr() != self._address:
            raise EngineError("a replay reads a buffer that has moved since capture")
        return found


@dataclass
class _Call:
    """One recorded call; ``kept`` holds its outputs, with None for outputs that are views of an argument."""

    function: Any
    args: Any
    kwargs: Any
    first: int
    kept: list[torch.Tensor | None] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """While active, every call is recorded. Values must not be read on the host.

    Attributes:
        baked: host numbers that recorded calls have fixed; the calls add them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.baked: list[Baked] = []
        self._index: dict[int, int] = {}
        self._alive: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in the reference device: without this torch imports its compiler, only to disable it here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.record(func, args, kwargs or {})

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call any ``func`` and record it as one call. The mode must not be active."""
        result = func(*args, **kwargs)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        call = _Call(func, mapped(self._reference, args), mapped(self._reference, kwargs), len(self._alive))
        for value in tensors(result):
            own = value.untyped_storage()._cdata not in storages
            call.kept.append(value if own else None)
            self._index[id(value)] = len(self._alive)
            self._alive.append(value)
        self.calls.append(call)
        return result

    def leave_out(self, work: Callable[[], None]) -> None:
        """Let replays call ``work`` here; it is not called now."""
        self.calls.append(_Call(work, (), {}, len(self._alive)))

    def _reference(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        index = self._index.get(id(value))
        if index is not None:
            return _RecordedOutput(index)
        self._alive.append(value)  # kept alive while recording, so that its id is not reused
        return _ExternalTensor(value)

    def finish(self) -> list[_Call]:
        """The recorded calls. Everything that they made is poisoned first, because a capture computes nothing."""
        calls, self._alive, self._index = self.calls, [], {}
        for call in calls:
            for made in call.kept:
                if made is not None and made.numel():
                    made.fill_(float("nan") if made.is_floating_point() else _POISON)
        return calls


class RecordedReplay(Replay):
    """Runs the calls again; ``updates`` and ``runs`` count.

    Raises:
        EngineError: (when called) an update is missing, or memory of the capture was freed or moved.
    """

    def __init__(self, calls: list[_Call], needs_update: bool, baked: Sequence[Baked] = ()) -> None:
        self._calls, self._needs_update, self._updated, self._baked = calls, needs_update, False, baked
        self.updates = self.runs = 0

    def update(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        for each in self._baked:
            each.refresh(query_lens, kv_lens)
        self.updates += 1
        self._updated = True

    @torch.inference_mode()
    def __call__(self) -> None:
        if self._needs_update and not self._updated:
            raise EngineError("this device's replays need an update before each run")
        self._updated = False
        self.runs += 1
        values: dict[int, torch.Tensor] = {}

        def value(reference: Any) -> Any:
            if isinstance(reference, _RecordedOutput):
                return values[reference.index]
            return reference.tensor() if isinstance(reference, _ExternalTensor) else reference

        for call in self._calls:
            result = call.function(*mapped(value, call.args), **mapped(value, call.kwargs))
            for offset, (new, kept) in enumerate(zip(tensors(result), call.kept, strict=True)):
                values[call.first + offset] = new if kept is None else kept.copy_(new)


class RecordingCapture(GraphCapture):
    """Captures by recording.

    Args:
        limit: captures that may exist at once; None is no limit.
        needs_update: replays refuse to run without an update.

    Attributes:
        replays: all captures, in order.
    """

    def __init__(self, limit: int | None, needs_update: bool) -> None:
        self._limit, self._needs_update = limit, needs_update
        self.replays: list[RecordedReplay] = []

    def capture(self, segment: Callable[[], None]) -> Replay:
        if self._limit is not None and len(self.replays) >= self._limit:
            raise EngineError(f"this device holds {self._limit} captures at once, and all are in use")
        recorder = Recorder()
        with torch.inference_mode(), ForbidHostReads(), recorder:  # type: ignore[no-untyped-call]
            segment()
        with torch.inference_mode():
            replay = RecordedReplay(recorder.finish(), self._needs_update, recorder.baked)
        self.replays.append(replay)
        return replay

    def release(self) -> None:
        self.replays.clear()
