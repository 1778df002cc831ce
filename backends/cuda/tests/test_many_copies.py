"""Many copies by one call of the driver, with a driver that is made up: cards run the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from evener_backend_cuda.many_copies import MOST, ManyCopies


class Driver:
    """Copies host memory to host memory. ``code``: of the call for all copies."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, list[str]()

    def cuMemcpyBatchAsync_v2(self, to: Any, sources: Any, sizes: Any, count: Any, *how: Any) -> int:
        self.calls.append("together")
        if not self.code:
            lists = ((ctypes.c_uint64 * count.value).from_address(each.value) for each in (to, sources, sizes))
            for target, source, size in zip(*lists, strict=True):
                ctypes.memmove(target, source, size)
        return self.code

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        self.calls.append("one")
        ctypes.memmove(to.value, source.value, size.value)
        return 0


class OldDriver:
    """Has no call for all copies, and refuses others with ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        if not self.code:
            ctypes.memmove(to.value, source.value, size.value)
        return self.code


def copied(many: ManyCopies, stream: int = 7, texts: Sequence[bytes] = (b"experts", b"of a layer")) -> Sequence[bytes]:
    """What is in the targets after as many copies."""
    sources = [ctypes.create_string_buffer(text, len(text)) for text in texts]
    targets = [ctypes.create_string_buffer(len(source)) for source in sources]
    to, begin = (np.array([ctypes.addressof(each) for each in all_], np.uint64) for all_ in (targets, sources))
    many(to, begin, np.array([len(each) for each in sources], np.uint64), stream)
    return [each.raw for each in targets]


def test_all_copies_are_one_call() -> None:
    driver = Driver()
    many = ManyCopies(lambda: driver)
    assert copied(many) == copied(many) == [b"experts", b"of a layer"]
    assert driver.calls == ["together"] * 2


def test_very_many_copies_are_several_calls() -> None:
    driver, texts = Driver(), [str(number).encode() for number in range(2 * MOST + 1)]
    assert copied(ManyCopies(lambda: driver), texts=texts) == texts
    assert driver.calls == ["together"] * 3


def test_the_default_stream_takes_no_batches() -> None:
    driver = Driver(code=1)
    many = ManyCopies(lambda: driver)
    assert copied(many, 0) == [b"experts", b"of a layer"] and driver.calls == ["one"] * 2
    driver.code = 0
    assert copied(many) == [b"experts", b"of a layer"] and driver.calls[2:] == ["together"]


def test_a_driver_that_refuses_the_call_gets_one_for_each_copy_and_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(code=801)
    many = ManyCopies(lambda: driver)
    assert copied(many) == copied(many) == [b"experts", b"of a layer"]
    assert driver.calls == ["together", *["one"] * 4]
    assert "cuMemcpyBatchAsync failed with 801" in caplog.text


def test_an_older_driver_gets_a_call_for_each_copy_and_an_error_is_raised() -> None:
    assert copied(ManyCopies(lambda: OldDriver(0))) == [b"experts", b"of a layer"]
    with pytest.raises(RuntimeError, match="failed with 700 for 7 bytes"):
        copied(ManyCopies(lambda: OldDriver(700)))
