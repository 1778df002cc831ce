"""A file of the model cache appears whole or not at all, and only one's own is read."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from evener_model_cache.cache_file import ALIGNMENT, CacheFile, Unusable, prepare_folder, write_cache

from evener.errors import ConfigError

LIMIT = 1 << 30
MADE = {"the file a": "1"}


def tensors(seed: int = 0, large: int = 100) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(large, 33, generator=draw), torch.randn(3, 5, generator=draw).bfloat16(),
        torch.randint(0, 255, (7,), generator=draw).to(torch.uint8), torch.randn((), generator=draw),
        torch.randn(4, 4, generator=draw).to(torch.float8_e4m3fn), torch.empty(0, 4),
        torch.randn(6, 8, generator=draw).T,
    ]  # fmt: skip


WEIGHTS = {"one": [0, 1], "two": [2, 3, 4, 5], "three": [6, 0]}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in zip(some, others, strict=True)
    )


def read(path: Path) -> list[torch.Tensor]:
    file = CacheFile(path, LIMIT)
    found = [file.tensor(number) for number in range(len(file.index.tensors))]
    file.close()
    return found


def test_tensors_are_read_as_written_and_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_cache(path, MADE, tensors(), WEIGHTS)
    file = CacheFile(path, LIMIT)
    assert file.index.weights == WEIGHTS and file.index.fingerprint == MADE
    assert equal(read(path), tensors())
    for number, tensor in enumerate(tensors()):
        extent = file.extent(number)
        assert extent.offset % ALIGNMENT == 0 and file.tensor(number).data_ptr() % ALIGNMENT == 0
        data = path.read_bytes()[extent.offset :][: tensor.nbytes]
        assert data == bytes(bits(tensor).tolist())


def test_nobody_else_can_open_what_is_written_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        prepare_folder(tmp_path / "deep/cache")
        write_cache(tmp_path / "deep/cache/a", MADE, tensors(), WEIGHTS)
    finally:
        os.umask(before)
    assert (tmp_path / "deep/cache").stat().st_mode & 0o777 == 0o700
    assert [(p.name, p.stat().st_mode & 0o777) for p in (tmp_path / "deep/cache").iterdir()] == [("a", 0o600)]


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """At 30 random moments or more, until both were seen. What it leaves does not disturb the next one."""
    path, rng = tmp_path / "a", random.Random(1)
    states = {number: tensors(number, large=20_000) for number in range(2)}
    seen: set[int] = set()
    for moment in range(1000):
        if moment >= 30 and len(seen) == 2:
            break
        child = os.fork()
        if not child:
            try:
                while True:
                    for number in (0, 1):
                        write_cache(path, {"number": str(number)}, states[number], WEIGHTS)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.0, 0.03) * (1 + moment // 30))  # a busy machine takes longer to write both
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if path.exists():
            number = int(CacheFile(path, LIMIT).index.fingerprint["number"])
            seen.add(number)
            assert equal(read(path), states[number])
        assert {each.name for each in tmp_path.iterdir()} <= {"a", "a.partial"}
    assert seen == {0, 1}
    write_cache(path, MADE, states[0], WEIGHTS)
    assert [each.name for each in tmp_path.iterdir()] == ["a"] and equal(read(path), states[0])


def test_weights_that_are_mapped_stay_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_cache(path, MADE, tensors(0), WEIGHTS)
    held = read(path)
    write_cache(path, MADE, tensors(1), WEIGHTS)
    assert equal(held, tensors(0)) and equal(read(path), tensors(1))


def test_two_writers_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    met: list[str] = []
    fsync = os.fsync

    def other(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(Unusable, match="another process is writing it"):
            write_cache(path, MADE, tensors(1), WEIGHTS)
        met.append("once")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", other)
    write_cache(path, MADE, tensors(0), WEIGHTS)
    assert met == ["once"] and equal(read(path), tensors(0))


def test_a_writer_that_waited_does_not_write_into_the_finished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened the unfinished file, and the other one renamed it before the lock was free."""
    path, opened = tmp_path / "a", os.open

    def slow(name: object, *more: object) -> int:
        descriptor = opened(name, *more)  # type: ignore[arg-type]
        monkeypatch.setattr(os, "open", opened)
        (tmp_path / "a.partial").rename(path)
        return descriptor

    (tmp_path / "a.partial").write_bytes(b"finished")
    monkeypatch.setattr(os, "open", slow)
    with pytest.raises(Unusable, match="another process"):
        write_cache(path, MADE, tensors(), WEIGHTS)
    assert path.read_bytes() == b"finished"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(Unusable, match="1,000 are free"):
            write_cache(path, MADE, tensors(), WEIGHTS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_cache(path, MADE, tensors(), WEIGHTS)
    assert list(tmp_path.iterdir()) == []


def test_links_and_files_of_others_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    with pytest.raises(Unusable, match="there is none yet"):
        CacheFile(real, LIMIT)
    write_cache(real, MADE, tensors(), WEIGHTS)
    link.symlink_to(real)
    with pytest.raises(Unusable, match="a link"):
        CacheFile(link, LIMIT)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unusable, match="no file"):
        CacheFile(tmp_path / "pipe", LIMIT)
    with pytest.raises(Unusable, match="more than these weights"):
        CacheFile(real, 1000)
    real.chmod(0o620)
    with pytest.raises(Unusable, match="others may write it"):
        CacheFile(real, LIMIT)
    real.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Unusable, match="another user"):
        CacheFile(real, LIMIT)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/a.partial").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic"):
        write_cache(tmp_path / "cache/a", MADE, tensors(), WEIGHTS)
    assert outside.read_bytes() == b"mine"


def test_a_folder_of_others_or_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/deeper"):
        with pytest.raises(ConfigError, match=f"model_cache={tmp_path / name} .*give"):
            prepare_folder(tmp_path / name)
    (tmp_path / "real").chmod(0o770)
    with pytest.raises(ConfigError, match="chmod go-w"):
        prepare_folder(tmp_path / "real")
    (tmp_path / "real").chmod(0o750)
    prepare_folder(tmp_path / "real")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="another user"):
        prepare_folder(tmp_path / "real")


def test_a_damaged_file_is_named_as_such_and_nothing_else_happens(tmp_path: Path) -> None:
    """400 files that were cut short or changed anywhere before the numbers: each is read as it was, or unusable."""
    path, rng = tmp_path / "a", random.Random(0)
    write_cache(path, MADE, tensors(), WEIGHTS)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(header)] = rng.choice((rng.randrange(256), *b'0",:[]{}-9e'))
        path.write_bytes(data)
        try:
            read(path)
        except Unusable as reason:
            refused += 1
            assert "damaged" in str(reason)
    assert refused > 200
