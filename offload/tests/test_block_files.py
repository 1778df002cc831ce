"""Files with blocks: written blocks are read, and nothing else is taken for a block."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evener_kv.files.block_files import BlockFiles, InUse, Key

FORM, SIZES = bytes(range(32)), [1000, 0, 64]
KEY: Key = (0, bytes(31) + b"k")
BLOCK = bytes(n * 7 % 251 for n in range(1000))


def filled(folder: Path, form: bytes = FORM) -> BlockFiles:
    files = BlockFiles(folder, form, SIZES)
    files.write(KEY, memoryview(BLOCK))
    return files


def found(files: BlockFiles, key: Key = KEY) -> bytes | None:
    block = bytearray(SIZES[key[0]])
    return bytes(block) if files.read(key, memoryview(block)) else None


def the_file(folder: Path) -> Path:
    (path,) = (each for each in folder.rglob("0-*") if each.is_file())
    return path


def test_a_block_is_found_again_by_the_next_run(tmp_path: Path) -> None:
    filled(tmp_path / "kv").close()
    again = BlockFiles(tmp_path / "kv", FORM, SIZES)
    assert again.keys() == [KEY] and found(again) == BLOCK
    again.remove(KEY)
    assert found(again) is None and again.keys() == []
    again.close()


def test_only_this_user_can_read_the_files(tmp_path: Path) -> None:
    os.umask(os.umask(0))  # whatever it is
    filled(tmp_path / "kv").close()
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("at", [0, 20, 60, 90, 500, -1])
def test_a_changed_byte_is_seen_and_the_file_removed(tmp_path: Path, at: int) -> None:
    files, path = filled(tmp_path / "kv"), the_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert found(files) is None and not path.exists()
    files.close()


def test_a_file_that_is_shorter_or_longer_is_no_block(tmp_path: Path) -> None:
    files, path = filled(tmp_path / "kv"), the_file(tmp_path)
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"x", b""):
        path.write_bytes(wrong)
        assert found(files) is None
    path.write_bytes(data[:-1])
    assert files.keys() == [] and not path.exists()
    files.close()


def test_blocks_of_another_model_and_of_another_key_are_not_read(tmp_path: Path) -> None:
    other = filled(tmp_path / "kv", bytes(32))
    mine = BlockFiles(tmp_path / "kv", FORM, SIZES)
    assert mine.keys() == [] and found(mine) is None
    path = the_file(tmp_path)
    moved = tmp_path / "kv" / FORM.hex()[:32] / path.parent.name / path.name
    moved.write_bytes(path.read_bytes())
    assert found(mine) is None, "its header names another format"
    key = (0, bytes(31) + b"l")
    path.rename(path.with_name(f"0-{key[1].hex()}"))
    assert found(other, key) is None, "its header names another key"
    mine.close()
    other.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    files, path = filled(tmp_path / "kv"), the_file(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic links"):
        found(files)
    assert files.keys() == []
    files.close()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with pytest.raises(NotADirectoryError):
        BlockFiles(tmp_path / "link", FORM, SIZES)


def test_a_folder_that_others_can_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o755)
    with pytest.raises(PermissionError, match="must belong to this user, and to nobody else"):
        BlockFiles(tmp_path / "kv", FORM, SIZES)


def test_two_engines_do_not_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = filled(tmp_path / "kv")
    monkeypatch.setattr("time.sleep", lambda _: monkeypatch.setattr("time.monotonic", lambda: float("inf")))
    with pytest.raises(InUse):
        BlockFiles(tmp_path / "kv", FORM, SIZES)
    first.close()


def test_half_written_files_are_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    filled(tmp_path / "kv").close()
    folder = the_file(tmp_path).parent
    (folder / f"0-{'ab' * 32}.new").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    files = BlockFiles(tmp_path / "kv", FORM, SIZES)
    assert files.keys() == [KEY]
    assert sorted(each.name for each in folder.iterdir()) == [the_file(tmp_path).name, "notes.txt"]
    files.close()
