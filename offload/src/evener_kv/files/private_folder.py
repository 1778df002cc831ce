"""Folders that this user alone can use, by descriptor: no link is followed, and a folder that is renamed later stays
the same. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private(path: Path) -> int:
    """Open a folder, made if it is missing (what is above it must be there). Returns a descriptor.

    Raises:
        OSError: it cannot be made or opened, is a link, belongs to another user, or others may use it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return _checked(os.open(path, _FOLDER), str(path))


def open_inside(folder: int, name: str) -> int:
    """As ``open_private``, for a folder in an open one."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=folder)
    return _checked(os.open(name, _FOLDER, dir_fd=folder), name)


def _checked(opened: int, name: str) -> int:
    found = os.fstat(opened)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(opened)
        raise PermissionError(f"{name} must belong to this user, and to nobody else (chmod 700)")
    return opened


def lock_within(folder: int, name: str, seconds: float = 5.0) -> int | None:
    """Lock a file in a folder, which is made; None: somebody else, in this process or another, has the lock for so
    long. The kernel releases it when the returned descriptor is closed, however the process ends.

    Raises:
        OSError: the file cannot be opened, or the file system has no locks.
    """
    opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    until = time.monotonic() + seconds
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return opened
            if time.monotonic() >= until:
                break
            time.sleep(0.01)  # an engine that ends may still have it
    except BaseException:
        os.close(opened)
        raise
    os.close(opened)
    return None
