"""The folder of an unfinished conversion: beside the result, under a name of its own, and renamed at the end. So the
result is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evener.errors import ConfigError

_KEY = "conversion.key"


@contextlib.contextmanager
def work_folder(result: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """The folder to write in. What an interrupted conversion with an equal ``key`` left is there; anything else was
    removed. When the block ends without an error, it becomes ``result``.

    Raises:
        ConfigError: ``result`` exists, another process converts to it, or there is no folder to put it in.
    """
    refuse_existing(result)
    folder = result.parent / f".{result.name}.converting"
    lock = result.parent / f".{result.name}.lock"
    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to {result.parent}: {error.strerror}; choose another place") from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "wait for it, or choose another name"
            raise ConfigError(f"another process is converting to {result}; {why}") from None
        refuse_existing(result)
        _prepare(folder, json.dumps(key, sort_keys=True))
        yield folder
        (folder / _KEY).unlink()
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        refuse_existing(result)
        folder.rename(result)
        _sync(result.parent)
        lock.unlink(missing_ok=True)
    finally:
        os.close(held)


def refuse_existing(result: Path) -> None:
    """Raises:
    ConfigError: there is something called ``result``.
    """
    if os.path.lexists(result):
        raise ConfigError(f"{result} exists; choose another name, or remove it first: nothing is overwritten")


def _prepare(folder: Path, key: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if not folder.is_symlink() and (folder / _KEY).read_text("utf-8") == key:
            return
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / _KEY).write_text(key, "utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
