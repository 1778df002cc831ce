"""Streams on host memory whose work is done as late as their owner allows: when an event of it is waited for, or was
asked for several times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
#: Ops without a result that anything needs at once.
_LATE = {_ATEN.copy_.default, _ATEN.index_copy_.default, _ATEN.index_select.out}
#: So often an event is not over when it is asked for.
PATIENCE = 3


class _Late(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LATE:
            return func(*args, **kwargs)
        self._stream.work.append(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])


class LateStream:
    """``with stream:`` puts work off; ``run(count)`` does the first ``count`` pieces of it."""

    current: LateStream | None = None

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.done = 0

    def __enter__(self) -> None:
        assert LateStream.current is None
        self._mode = _Late(self)
        self._mode.__enter__()
        LateStream.current = self

    def __exit__(self, *reason: object) -> None:
        LateStream.current = None
        self._mode.__exit__(*reason)

    def run(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.work[self.done - 1]()


class LateEvent:
    """Recorded in the current stream; the step's own queue is never late."""

    def record(self) -> None:
        self._stream = LateStream.current
        self._count = len(self._stream.work) if self._stream is not None else 0
        self._asked = 0

    def wait(self) -> None:
        if self._stream is None:
            return
        waiting = LateStream.current
        if waiting is None:
            self._stream.run(self._count)
        elif waiting is not self._stream:
            waiting.work.append(lambda: self._stream is None or self._stream.run(self._count))

    def query(self) -> bool:
        self._asked += 1
        if self._stream is not None and self._asked > PATIENCE:
            self._stream.run(self._count)
        return self._stream is None or self._stream.done >= self._count
