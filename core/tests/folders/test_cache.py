"""The cache folder is this user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evener.folders.cache import is_trusted, make_private


def test_every_level_that_is_created_is_this_users_alone_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "home/evener/probes")
    finally:
        os.umask(before)
    for level in ("home", "home/evener", "home/evener/probes"):
        assert (tmp_path / level).stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_narrowed(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide").chmod(0o777)
    make_private(tmp_path / "wide")
    assert (tmp_path / "wide").stat().st_mode & 0o777 == 0o700


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user; remove it, or set XDG_CACHE_HOME"):
        make_private(tmp_path)


def test_a_file_that_others_could_have_written_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch(0o644)
    assert is_trusted(file)
    file.chmod(0o666)
    assert not is_trusted(file)
    file.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert is_trusted(file) == (file.stat().st_uid == 0)
