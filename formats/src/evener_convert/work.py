"""The folder of an unfinished conversion: beside the result, under a name of its own. At the end it is renamed, or the
one file in it is. So the result is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evener.errors import ConfigError, EvenerError

_KEY = "conversion.key"


@contextlib.contextmanager
def work_folder(result: Path, key: Mapping[str, Any], single: bool = False) -> Iterator[Path]:
    """The folder to write in. What an interrupted conversion with an equal ``key`` left is there; anything else was
    removed. When the block ends without an error, it becomes ``result``; if ``single``, the file of that name in it
    does, and the folder is removed. After an error of ours it is removed, too.

    Raises:
        ConfigError: ``result`` exists, another process converts to it, or nothing can be written there.
    """
    refuse_existing(result)
    folder = result.parent / f".{result.name}.converting"
    try:
        held = _locked(folder, result)
    except OSError as error:
        raise ConfigError(f"cannot write to {result.parent}: {error.strerror}; choose another place") from error
    try:
        _prepare(folder, json.dumps(key, sort_keys=True))
        yield folder
        (folder / _KEY).unlink()
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        refuse_existing(result)
        (folder / result.name if single else folder).rename(result)
        _sync(result.parent)
        if single:
            shutil.rmtree(folder)
    except EvenerError:
        shutil.rmtree(folder)
        raise
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"the files so far are kept in {folder}: the same command goes on there") from stop
    except OSError as error:
        raise ConfigError(
            f"cannot write {result}: {error.strerror}; the files so far are kept in {folder}: make room and type "
            "the same command again, or remove it"
        ) from error
    finally:
        os.close(held)


def refuse_existing(result: Path) -> None:
    """Raises:
    ConfigError: there is something called ``result``.
    """
    if os.path.lexists(result):
        raise ConfigError(f"{result} exists; choose another name: nothing is overwritten")


def _locked(folder: Path, result: Path) -> int:
    """An open folder of this user's, which no other process holds."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_uid != os.geteuid() or not os.path.samestat(os.fstat(held), os.stat(folder)):
            raise BlockingIOError
    except BlockingIOError:
        os.close(held)
        raise ConfigError(
            f"another process or user is converting to {result}; wait for it, or choose another name"
        ) from None
    return held


def _prepare(folder: Path, key: str) -> None:
    """Remove what is in the folder unless it belongs to a conversion with this ``key``."""
    with contextlib.suppress(OSError, ValueError):
        if (folder / _KEY).read_text("utf-8") == key:
            return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / _KEY).write_text(key, "utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
