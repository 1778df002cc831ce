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
    found = advised.ranges()
    asked = {name for name, (_, begin, end) in ranges.items() if any(b <= begin and end <= e for b, e in found)}
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


def test_the_window_goes_on_in_the_next_files_and_asks_for_nothing_twice(tmp_path: Path, advised: Advised) -> None:
    following = [tmp_path / "second", tmp_path / "third", tmp_path / "gone"]
    for file, size in zip(following, (1, 8), strict=False):
        file.write_bytes(bytes(size * MB))
    ahead = ReadAhead(layers(tmp_path / "model", 5), following)
    for number in range(5):
        ahead.used(f"layers.{number}.weight")
    for each in _threads():
        each.join(timeout=20)
    # The window is 4 MB: behind the last tensor it has the whole second file and 3 MB of the third.
    assert sum(size for _, size in advised.calls) == (5 + 1 + 3) * MB
    advised.calls.clear()


def test_a_model_is_read_from_its_first_file_on_and_fills_a_part_of_the_memory(
    tmp_path: Path, advised: Advised, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("model-10.safetensors", 4), ("model-9.safetensors", 3), ("other.safetensors", 9)):
        (tmp_path / name).write_bytes(bytes(size * MB))
    heads: list[str] = []
    monkeypatch.setattr(read_ahead, "_read_head", lambda file: heads.append(file.name))
    monkeypatch.setattr(read_ahead, "_free_memory", lambda: 10 * MB)
    monkeypatch.setattr(read_ahead, "_step", lambda device: 16 * MB)
    for each in read_ahead.begin_reading(tmp_path):
        each.join(timeout=20)
    assert sorted(heads) == ["model-10.safetensors", "model-9.safetensors"]
    assert sorted(advised.calls) == [(0, 2 * MB), (0, 3 * MB)]  # half of what is free, the ninth before the tenth
    advised.calls.clear()
    monkeypatch.setattr(read_ahead, "_free_memory", lambda: 0)  # a system that does not say
    assert read_ahead.begin_reading(tmp_path) == []
    assert read_ahead.begin_reading(tmp_path / "no such model") == []


def test_a_file_s_device_says_how_much_one_call_reads(tmp_path: Path) -> None:
    assert read_ahead._step(os.makedev(4095, 1)) == 128 << 10  # no device has this number
    assert 128 << 10 <= read_ahead._step(tmp_path.stat().st_dev) <= 16 << 20
    assert read_ahead._free_memory() > MB
