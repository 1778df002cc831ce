"""Words that a stream waits for, with a driver that is made up; page-locked memory that kernels read, on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener_backend_cuda.host_memory import await_word, mapped


class Driver:
    """Notes what it is asked for. ``code``: what it answers."""

    def __init__(self, code: int) -> None:
        self._code, self.asked = code, list[tuple[int, ...]]()

    def cuStreamWaitValue32_v2(self, *given: Any) -> int:
        self.asked.append(tuple(each.value for each in given))
        return self._code


def test_a_stream_waits_until_the_word_is_more_than_nothing() -> None:
    driver, word = Driver(0), torch.zeros(1, dtype=torch.int32)
    await_word(word, 7, driver)
    at_least = 0
    assert driver.asked == [(7, word.data_ptr(), 1, at_least)]


def test_a_driver_that_cannot_wait_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed with 801"):
        await_word(torch.zeros(1, dtype=torch.int32), 7, Driver(801))


@pytest.mark.gpu
def test_a_card_reads_what_was_written_after_its_work_was_submitted() -> None:
    device = torch.device("cuda", 0)
    host, word = (torch.zeros(64, dtype=kind, pin_memory=True) for kind in (torch.bfloat16, torch.int32))
    there, rows = mapped(host, device), torch.ones(64, dtype=torch.bfloat16, device=device)
    assert there.data_ptr() == host.data_ptr() and there.device == device
    rows.add_(there)  # the kernel is loaded now: later that would wait for the stream
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        await_word(word[:1], stream.cuda_stream)
        rows.add_(there)
        done.record()
    assert not done.query()
    host.view(torch.int16).numpy().fill(0x4040)  # 3.0
    word.numpy()[0] = 1
    done.synchronize()
    assert rows.tolist() == [4.0] * 64
