"""Calls of the host in captured steps, without the driver's thread: the device writes a word in page-locked memory and
waits for another one, and a thread of this process spins on the first. Measured beside ``cuLaunchHostFunc`` by
``benchmarks/host_calls.py``.

The word on which the thread waits is a lock of ``pthread_spin_lock``, which the device unlocks: so the thread spins in
C, without Python's lock. It spins only while a submitted step has calls left, and sleeps otherwise. If a library can
answer all calls of a capture together, Python is not needed between them either.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from evener_backend_cuda.host_kernel import exchange_kernel
from evener_backend_parts.graphs import TorchGraphs, TorchReplay

log = logging.getLogger("evener.cuda")
#: Larger rows are copied by the copy engines: one program moves few bytes at a time.
MOST_BYTES = 1 << 17
#: Calls whose words are allocated together; int32 elements of a cache line.
_CALLS, _LINE = 64, 16
_THREADS = 512
#: Seconds for which the end of a device waits for a step that runs.
_PATIENCE = 10.0
_Work = Callable[[], None]
#: Answers the calls of a replay: its argument is the address of a ``_State``.
_Together = Callable[[int], None]


class Call(NamedTuple):
    """A place where the device calls the host: tensors of one word."""

    ready: torch.Tensor
    done: torch.Tensor
    work: weakref.ref[_Work]


#: The calls of a replay, and what answers them together.
_Step = tuple[Sequence[Call], _Together | None]


class _State(ctypes.Structure):
    """What the thread and those who end it share: the address of the word that is waited for, or 0; and whether the
    thread is to end once that is unlocked."""

    _fields_ = (("waiting", ctypes.c_int64), ("closed", ctypes.c_int64))
    waiting: int
    closed: int


class HostCalls:
    """The words, and the thread that answers: steps in the order in which they were submitted, their calls in the order
    in which they were captured. One step's calls must not wait for another's that is submitted later.

    Args:
        words: makes page-locked memory: int32 zeros of a shape.
    """

    def __init__(self, words: Callable[..., torch.Tensor]) -> None:
        self._words = words
        self._free: list[torch.Tensor] = []
        self._taken = 0  # since the last capture
        self._recorded: list[Call] | None = None
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._state = _State()
        self._end: Callable[[], object] | None = None
        #: Held from the submission of a step until it is in the queue, so that both have one order.
        self._order = threading.Lock()

    def close(self) -> None:
        """End the thread after the steps that run. It ends with this object, and with the process, too."""
        if self._end is not None:
            self._end()

    def new(self, work: _Work) -> Call:
        """Words for calls of ``work``, which the caller keeps."""
        self._reserve(1)
        both, self._taken = self._free.pop(), self._taken + 1
        _locked(both[0].data_ptr())
        return Call(both[0, :1], both[1, :1], weakref.ref(work))

    def launch(self, call: Call, launch: Callable[[], None]) -> None:
        """Submit a call with ``launch``; if a capture records it, each of its replays calls."""
        if self._recorded is not None:
            launch()
            self._recorded.append(call)
        else:
            self.submit([call], launch)

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """The calls that are captured meanwhile: no more than were made before, as every step runs once before its
        capture. During one no memory may be page-locked."""
        self._reserve(self._taken)
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded, self._taken = None, 0

    def _reserve(self, count: int) -> None:
        if len(self._free) < count:
            self._free += self._words(max(count, _CALLS), 2, _LINE)

    def submit(self, calls: Sequence[Call], launch: Callable[[], None], together: _Together | None = None) -> None:
        """Submit with ``launch`` what makes these calls. ``together`` answers them, if there is such a function."""
        if self._end is None:
            thread = threading.Thread(target=_answer, args=(self._steps, self._state), name="host calls", daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _end, self._steps, self._state, thread)
        with self._order:
            launch()
            self._steps.put((calls, together))


class CallingGraphs(TorchGraphs):
    """Graphs whose replays are answered."""

    def capture(self, segment: Callable[[], None]) -> TorchReplay:
        calls: HostCalls = self.device.host_calls  # type: ignore[attr-defined]  # it is this backend's device
        with calls.recording() as recorded:
            replay = super().capture(segment)
        assert isinstance(replay, TorchReplay)
        return _Calling(replay.graph, calls, recorded) if recorded else replay


class _Calling(TorchReplay):
    def __init__(self, graph: Any, calls: HostCalls, recorded: Sequence[Call]) -> None:
        super().__init__(graph)
        self._calls, self._recorded = calls, recorded
        self._together = _together(recorded)

    def __call__(self) -> None:
        self._calls.submit(self._recorded, self.graph.replay, self._together)


def _together(calls: Sequence[Call]) -> _Together | None:
    """What answers all of these calls in one; None: their works do not say how (``answers``)."""
    works = [call.work() for call in calls]
    answers = getattr(works[0], "answers", None)
    if answers is None or any(type(work) is not type(works[0]) for work in works):
        return None
    words = [(call.ready.data_ptr(), call.done.data_ptr()) for call in calls]
    found: _Together | None = answers([(work, *both) for work, both in zip(works, words, strict=True)])
    return found


def exchange(
    calls: HostCalls, order: torch.Tensor, inputs: Sequence[torch.Tensor], to: Sequence[torch.Tensor], work: _Work,
    found: torch.Tensor, result: torch.Tensor,
) -> None:  # fmt: skip
    """``CudaDevice.exchange``. ``order``: see ``exchange_kernel``."""
    call = calls.new(work)
    small = result.nbytes <= MOST_BYTES and result.nbytes % 16 == 0 and all(t.is_contiguous() for t in inputs)
    x, ids, weights = (t.view(torch.int32) for t in inputs) if small else (order, order, order)
    to_x, to_ids, to_weights = (t.view(torch.int32) for t in to) if small else (order, order, order)
    back, out = (found.view(torch.int32), result.view(torch.int32)) if small else (order, order)
    if not small:
        for source, target in zip(inputs, to, strict=True):
            target.copy_(source, non_blocking=True)
    vectors, pairs = (x.numel() // 4, ids.numel()) if small else (0, 0)
    calls.launch(call, lambda: exchange_kernel[(1,)](
        x, to_x, vectors, ids, to_ids, weights, to_weights, pairs, back, out,
        call.ready, call.done, order, READY=UNLOCKED, TILE=4 * _THREADS, FEW=_THREADS,
        num_warps=_THREADS // 32,
    ))  # fmt: skip
    if not small:
        result.copy_(found, non_blocking=True)


def _answer(steps: SimpleQueue[_Step | None], state: _State) -> None:
    """Answer until the queue gives None."""
    while (step := steps.get()) is not None:
        calls, together = step
        if together is not None:
            together(ctypes.addressof(state))
        for call in calls if together is None else ():
            state.waiting = call.ready.data_ptr()
            _wait(state.waiting)
            if state.closed:
                return
            try:
                if (work := call.work()) is None:
                    raise RuntimeError("a replay calls a function of the host that is no longer there")
                work()
                del work
            except BaseException:  # nothing could catch it here, and the device waits
                log.exception("a call of the host failed")
            finally:
                # An aligned word is stored at once. Rows that other threads wrote are there already: the end of the
                # call that computed them comes between.
                ctypes.c_int.from_address(call.done.data_ptr()).value = 1
        del step, calls, together  # they keep memory
        if state.closed:
            return
        state.waiting = 0


def _end(steps: SimpleQueue[Any], state: _State, thread: threading.Thread) -> None:
    """End the thread after the steps that run; if the device does not finish them, without them."""
    steps.put(None)
    if thread is threading.current_thread():
        return
    thread.join(_PATIENCE)
    if thread.is_alive() and state.waiting:
        state.closed = 1
        ctypes.c_int.from_address(state.waiting).value = UNLOCKED
        thread.join(_PATIENCE)


_LIBC = ctypes.CDLL(None)


def _wait(address: int) -> None:
    """Spin until somebody unlocks it."""
    _LIBC.pthread_spin_lock(ctypes.c_void_p(address))


def _locked(address: int) -> int:
    """Make it a locked lock; the number that would unlock it."""
    _LIBC.pthread_spin_init(ctypes.c_void_p(address), 0)
    unlocked = ctypes.c_int.from_address(address).value
    _wait(address)
    return unlocked


def _unlocked() -> int:
    word = ctypes.c_int()
    return _locked(ctypes.addressof(word))


#: The number that unlocks a lock: 1 on x86, 0 elsewhere.
UNLOCKED = _unlocked()
