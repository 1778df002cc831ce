"""What captured steps ask the host: the kernel, run by Triton's interpreter, and the thread that answers it."""

from __future__ import annotations

import ctypes
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from interpreted import every_access_checked

from evener_backend_cuda import host_calls
from evener_backend_cuda.host_calls import UNLOCKED, HostCalls, exchange
from evener_backend_parts.graphs import TorchReplay

HIDDEN, TOP = 64, 3
words = partial(torch.zeros, dtype=torch.int32)


class Layer:
    """Rows of one layer, and what the host makes of them: twice the rows, more where a token's ids are larger."""

    def __init__(self, rows: int, hidden: int = HIDDEN) -> None:
        self.inputs = [torch.empty(rows, hidden, dtype=torch.bfloat16), torch.empty(rows, TOP, dtype=torch.int32),
                       torch.empty(rows, TOP)]  # fmt: skip
        self.to = [torch.zeros_like(each) for each in self.inputs]
        self.found, self.result = torch.zeros_like(self.to[0]), torch.zeros_like(self.to[0])
        self.draw()

    def draw(self) -> torch.Tensor:
        """New inputs; what the result has to be."""
        for each in self.inputs:
            each.copy_(torch.randint(0, 8, each.shape))
        return self.answer(*self.inputs)

    def answer(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (2 * x + (ids * weights).sum(1, keepdim=True)).bfloat16()

    def work(self) -> None:
        self.found.copy_(self.answer(*self.to))


class Chip:
    """Runs launches in order in a thread of its own, as a device does. Graphs hold what was launched in a capture."""

    def __init__(self) -> None:
        self._launches: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.captured: list[Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """What takes the place of the kernel."""
        return lambda *given, **named: self.launch(lambda: KERNEL[grid](*given, **named))

    def launch(self, work: Callable[[], None]) -> None:
        if self.captured is None:
            self._launches.put(work)
        else:
            self.captured.append(work)

    def synchronize(self) -> None:
        done = threading.Event()
        self._launches.put(done.set)
        assert done.wait(60), "the device waits for the host"

    def end(self) -> None:
        self._launches.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (work := self._launches.get()) is not None:
            work()


KERNEL = host_calls.exchange_kernel


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chip]:
    made = Chip()
    monkeypatch.setattr(host_calls, "exchange_kernel", made)
    yield made
    made.end()


@pytest.fixture
def calls(chip: Chip) -> Iterator[HostCalls]:
    made = HostCalls(words)
    yield made
    chip.synchronize()
    made.close()
    assert answering() is None


def answering() -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == "host calls"), None)


def order() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("rows", [1, 33])
def test_rows_go_to_the_host_and_its_answer_comes_back(chip: Chip, calls: HostCalls, rows: int) -> None:
    layer, call = Layer(rows), order()
    work = layer.work
    for _ in range(3):
        want = layer.draw()
        exchange(calls, call, layer.inputs, layer.to, work, layer.found, layer.result)
        chip.synchronize()
        assert torch.equal(layer.result, want)


@pytest.mark.parametrize(("rows", "hidden"), [(host_calls.MOST_BYTES // HIDDEN, HIDDEN), (3, 2)])
def test_rows_that_the_kernel_does_not_move_are_copied_around_it(
    chip: Chip, calls: HostCalls, rows: int, hidden: int
) -> None:
    """Too many, or not in pieces of 16 bytes. A copy here does not wait for the device."""
    layer, ran = Layer(rows, hidden), list[torch.Tensor]()
    layer.draw()
    layer.found.fill_(3.0)

    def work() -> None:
        ran.extend(each.clone() for each in layer.to)

    exchange(calls, order(), layer.inputs, layer.to, work, layer.found, layer.result)
    chip.synchronize()
    assert all(map(torch.equal, ran, layer.inputs)) and len(ran) == 3 and layer.result.eq(3.0).all()


def test_the_kernel_reaches_its_tensors_alone(calls: HostCalls) -> None:
    """The host has come already: while accesses are checked no other thread may launch."""
    call, given = calls.new(print), order()
    ctypes.c_int.from_address(call.done.data_ptr()).value = 1
    layer = Layer(5)
    x, ids, weights = (each.view(torch.int32) for each in layer.inputs)
    to_x, to_ids, to_weights = (each.view(torch.int32) for each in layer.to)
    layer.found.copy_(torch.randn(5, HIDDEN))
    with every_access_checked():
        KERNEL[(1,)](
            x, to_x, x.numel() // 4, ids, to_ids, weights, to_weights, ids.numel(), layer.found.view(torch.int32),
            layer.result.view(torch.int32), call.ready, call.done, given, READY=UNLOCKED, TILE=128, FEW=8,
        )  # fmt: skip
    assert call.ready.item() == UNLOCKED and call.done.item() == 0 and given.item() == 2
    for source, target in zip(layer.inputs, layer.to, strict=True):
        assert torch.equal(source, target)
    assert torch.equal(layer.result, layer.found)


class Recorded:
    """A graph of the chip."""

    def __init__(self, chip: Chip, launches: list[Callable[[], None]]) -> None:
        self._chip, self._launches = chip, launches

    def replay(self) -> None:
        for launch in self._launches:
            self._chip.launch(launch)


def captured(chip: Chip, calls: HostCalls, layers: list[Layer], works: list[Any]) -> TorchReplay:
    """A replay of these layers, one after another."""
    chip.captured = []
    with calls.recording() as recorded:
        for layer, work in zip(layers, works, strict=True):
            exchange(calls, order(), layer.inputs, layer.to, work, layer.found, layer.result)
    graph, chip.captured = Recorded(chip, chip.captured), None
    return host_calls._Calling(graph, calls, recorded)


def test_replays_are_answered_in_the_order_in_which_they_are_submitted(chip: Chip, calls: HostCalls) -> None:
    """Several at once, of two captures, the same one again before it has run."""
    seen, first, second = list[tuple[str, int]](), [Layer(2), Layer(2)], [Layer(5)]

    def watched(name: str, layer: Layer) -> Callable[[], None]:
        def work() -> None:
            layer.work()
            seen.append((name, len(layer.to[0])))

        return work

    works = [watched("a", first[0]), watched("b", first[1]), watched("c", second[0])]
    one, two = captured(chip, calls, first, works[:2]), captured(chip, calls, second, works[2:])
    want = [layer.draw() for layer in (*first, *second)]
    for replay in (one, two, two, one):
        replay()
    chip.synchronize()
    assert [name for name, _ in seen] == list("abccab")
    assert all(map(torch.equal, (layer.result for layer in (*first, *second)), want))


class Together:
    """Work whose calls of a step are answered by one function."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __call__(self) -> None:
        raise AssertionError("the others answer with it")

    @staticmethod
    def answers(calls: list[tuple[Together, int, int]]) -> Callable[[int], None]:
        def answer(state: int) -> None:
            shared = host_calls._State.from_address(state)
            for work, ready, done in calls:
                shared.waiting = ready
                host_calls._wait(ready)
                if shared.closed:
                    return
                work.layer.work()
                ctypes.c_int.from_address(done).value = 1

        return answer


def test_calls_of_a_replay_are_answered_by_one_function_if_there_is_one(chip: Chip, calls: HostCalls) -> None:
    layers = [Layer(2), Layer(3), Layer(1)]
    works: list[Any] = [Together(layers[0]), Together(layers[1]), layers[2].work]
    replay, other = captured(chip, calls, layers[:2], works[:2]), captured(chip, calls, layers[2:], works[2:])
    for _ in range(3):
        want = [layer.draw() for layer in layers]
        replay()
        other()
        chip.synchronize()
        assert all(map(torch.equal, (layer.result for layer in layers), want))


def test_a_function_that_waits_for_a_device_that_never_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_calls, "_PATIENCE", 0.2)
    calls, work = HostCalls(words), Together(Layer(1))
    call = calls.new(work)
    calls.submit([call], lambda: None, host_calls._together([call]))
    thread = answering()
    assert thread is not None and thread.is_alive()
    calls.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_capture_locks_no_memory(chip: Chip) -> None:
    """Its words are reserved before: as many as the step took that ran before it."""
    locked = list[int]()

    def counted(*shape: int) -> torch.Tensor:
        locked.append(shape[0])
        return words(*shape)

    calls, layers = HostCalls(counted), 40
    for _ in range(3):
        for _ in range(layers):
            calls.new(print)
        with calls.recording():
            before = len(locked)
            for _ in range(layers):
                calls.new(print)
            assert len(locked) == before
    calls.close()


def test_two_devices_are_answered_side_by_side(chip: Chip, calls: HostCalls) -> None:
    """As two engines in one process: a step of one that waits does not hold up the other's."""
    other, ended = Chip(), threading.Event()
    layer, another = Layer(2), Layer(3)
    works = [lambda: ended.wait(60) and layer.work(), another.work]
    exchange(calls, order(), layer.inputs, layer.to, works[0], layer.found, layer.result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_calls, "exchange_kernel", other)
        more = HostCalls(words)
        want = another.draw()
        exchange(more, order(), another.inputs, another.to, works[1], another.found, another.result)
        other.synchronize()
        assert torch.equal(another.result, want)
        more.close()
    ended.set()
    chip.synchronize()
    other.end()


def test_a_call_that_raises_or_is_gone_does_not_stop_the_device(
    chip: Chip, calls: HostCalls, caplog: pytest.LogCaptureFixture
) -> None:
    layer, raised = Layer(1), list[str]()

    def raises() -> None:
        raised.append("raised")
        raise ValueError("a wrong tensor")

    exchange(calls, order(), layer.inputs, layer.to, raises, layer.found, layer.result)
    exchange(calls, order(), layer.inputs, layer.to, lambda: None, layer.found, layer.result)
    chip.synchronize()
    want = layer.draw()
    work = layer.work
    exchange(calls, order(), layer.inputs, layer.to, work, layer.found, layer.result)
    chip.synchronize()
    assert raised and torch.equal(layer.result, want)
    assert "a wrong tensor" in caplog.text and "no longer there" in caplog.text


def test_the_thread_sleeps_while_no_step_runs(chip: Chip, calls: HostCalls) -> None:
    layer = Layer(1)
    work = layer.work
    exchange(calls, order(), layer.inputs, layer.to, work, layer.found, layer.result)
    chip.synchronize()
    thread = answering()
    assert thread is not None
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    time.sleep(0.05)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before < 0.1


def test_a_device_that_never_asks_does_not_keep_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error of the device: the words of a submitted step are never written."""
    monkeypatch.setattr(host_calls, "_PATIENCE", 0.2)
    calls, called = HostCalls(words), list[str]()

    def work() -> None:
        called.append("called")

    calls.submit([calls.new(work)], lambda: None)
    thread, gone = answering(), weakref.ref(calls)
    assert thread is not None and thread.is_alive()
    del calls
    gc.collect()
    thread.join(10)
    assert gone() is None and not thread.is_alive() and not called
