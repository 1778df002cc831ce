"""Folders of runs: nobody else can read them, they go when closed, and those of killed ones with the next that opens or
closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.errors import ConfigError
from evener.folders.run import RunFolder

OWNER = (
    "import sys; from evener.folders.run import RunFolder; mine = RunFolder()\n"
    "print(mine.path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(where: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A process that lives and has a folder, and that folder."""
    environment = {**os.environ, "TMPDIR": str(where)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process


def test_a_folder_is_private_and_removed_on_close(where: Path) -> None:
    folder = RunFolder()
    Path(folder.path, "file").touch()
    assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not list(where.iterdir())


def test_a_folder_too_deep_for_sockets_is_refused_with_what_to_set(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = where / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = RunFolder()
    with pytest.raises(ConfigError, match="is too long for sockets: set TMPDIR to a shorter one"):
        folder.socket("controller")
    folder.close()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    short = RunFolder()
    assert short.socket("controller") == f"ipc://{short.path}/controller"
    short.close()


def test_closing_a_folder_removes_those_of_killed_children(
    where: Path, owner: tuple[Path, subprocess.Popen[str]]
) -> None:
    theirs, child = owner
    mine = RunFolder()
    child.kill()
    child.wait()
    assert set(where.iterdir()) == {Path(mine.path), theirs}
    mine.close()
    assert not list(where.iterdir())


def test_only_folders_of_dead_runs_are_removed_at_start(where: Path, owner: tuple[Path, subprocess.Popen[str]]) -> None:
    theirs, process = owner
    other = where / "evener-models"
    other.mkdir()
    (theirs / "file").touch()
    first = RunFolder()
    assert (theirs / "file").exists(), "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    second = RunFolder()
    assert set(where.iterdir()) == {Path(first.path), Path(second.path), other}
    first.close()
    second.close()
