"""The next tensors of a weight file are asked for while earlier ones are in use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evener.loading.checkpoint import open_checkpoint
from evener_formats import read_ahead
from evener_formats.read_ahead import FileRange, ReadAhead

MB = 1 << 20


class Advised:
    """Records the bytes that the system was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, handle: int, begin: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and size > 0 and os.fstat(handle)
        self.calls.append((begin, size))

    def ranges(self) -> list[tuple[int, int]]:
        """What was asked for once the threads have ended: in order, neighbours joined."""
        for each in _threads():
            each.join(timeout=20)
        assert not _threads()
        joined: list[tuple[int, int]] = []
        for begin, size in sorted(self.calls):
            if joined and begin < joined[-1][1]:
                raise AssertionError("bytes were asked for twice")
            if joined and begin == joined[-1][1]:
                joined[-1] = joined[-1][0], begin + size
            else:
                joined.append((begin, begin + size))
        return joined


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Advised]:
    found = Advised()
    monkeypatch.setattr(os, "posix_fadvise", found)
    monkeypatch.setattr(read_ahead, "WINDOW", 4 * MB)
    monkeypatch.setattr(read_ahead, "MIN_BYTES", 4 * MB)
    yield found
    found.ranges()


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("evener-read-ahead")]


def layers(file: Path, count: int = 12) -> dict[str, FileRange]:
    """Tensors of 1 MB in the order of their names as texts: layer 10 lies before layer 2."""
    file.touch()
    names = sorted(f"layers.{number}.weight" for number in range(count))
    return {name: FileRange(file, place * MB, (place + 1) * MB) for place, name in enumerate(names)}


def test_the_layers_that_follow_are_asked_for_and_none_twice(tmp_path: Path, advised: Advised) -> None:
    ranges = layers(tmp_path / "model")
    ahead = ReadAhead(ranges)
    ahead.used("layers.8.weight")
    ahead.used("layers.9.weight")
    ahead.used("layers.9.weight")
    ahead.used("layers.11.weight")  # the last one: the threads end
    wanted = sorted(ranges[f"layers.{number}.weight"][1:] for number in (8, 9, 10, 11))
    assert advised.ranges() == [(wanted[0][0], wanted[1][1]), (wanted[2][0], wanted[3][1])]
    ahead.close()


def test_no_more_than_the_window_is_asked_for_ahead(tmp_path: Path, advised: Advised) -> None:
    ahead = ReadAhead(layers(tmp_path / "model"))
    ahead.used("layers.0.weight")
    ahead._pool.shutdown()  # type: ignore[union-attr]  # all requests are done
    assert sum(size for _, size in advised.calls) == 5 * MB  # its own, and the window


def test_after_a_jump_reading_goes_on_from_there(tmp_path: Path, advised: Advised) -> None:
    ranges = layers(tmp_path / "model", 40)
    ahead = ReadAhead(ranges)
    for number in (0, 30, 2, 39):
        ahead.used(f"layers.{number}.weight")
        if ahead._pool is not None:
            ahead._pool.shutdown()
            ahead._pool = None
    advised.ranges()
    asked = {name for name, (_, begin, _) in ranges.items() if any(b == begin for b, _ in advised.calls)}
    assert asked == {f"layers.{n}.weight" for n in (*range(7), *range(30, 35), 39)}


def test_small_checkpoints_start_no_thread(tmp_path: Path, advised: Advised) -> None:
    ahead = ReadAhead(layers(tmp_path / "model", 3))
    ahead.used("layers.0.weight")
    assert ahead._pool is None and not advised.calls


def test_a_file_that_is_gone_or_takes_no_advice_is_left_to_its_reader(
    tmp_path: Path, advised: Advised, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = layers(tmp_path / "model")
    (tmp_path / "model").unlink()
    ReadAhead(ranges).used("layers.11.weight")

    def refused(*_: object) -> None:
        raise OSError("no advice")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    ReadAhead(layers(tmp_path / "model")).used("layers.11.weight")
    assert not advised.calls


@pytest.mark.parametrize("reader", ["tensor", "extent"])
def test_a_folder_of_safetensors_is_read_ahead(tmp_path: Path, advised: Advised, reader: str) -> None:
    names = [f"layers.{number}.weight" for number in range(12)]
    save_file({name: torch.zeros(512, 512) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.headers  # noqa: B018  # a description costs no reading
    assert not advised.calls
    for name in names:
        getattr(checkpoint, reader)(name)
    checkpoint.close()
    size = (tmp_path / "model.safetensors").stat().st_size
    (found,) = advised.ranges()
    assert found == (size - 12 * MB, size)
