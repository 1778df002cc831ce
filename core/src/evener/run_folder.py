"""Folders for the files of one run: socket files, scratch. What a killed process left goes when another starts or ends.

The owner holds a lock on its folder, which the kernel lets go of whatever becomes of the owner. Nobody else could tidy
up for sure: a process that ends with its parent may end at any instruction.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from evener.errors import ConfigError

_PREFIX = "evener-run-"


class RunFolder:
    """A new folder that only this user can open. Making one, and closing one, removes those whose owners are gone: a
    process that ends its children before they are done tidies up behind them.

    Attributes:
        path: of the folder.

    Raises:
        OSError: there is no room for it, or its file system has no locks.
    """

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self._lock: int | None = None
        while self._lock is None:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            # Somebody else who starts may have found it without its lock.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                self._lock = _lock(self.path)

    def socket(self, name: str) -> str:
        """The address of a socket in it.

        Raises:
            ConfigError: the system does not take paths that long.
        """
        if len(os.fsencode(self.path)) > 80:  # Systems take paths of 104 bytes; names may become a little longer.
            raise ConfigError(f"{self.path} is too long a path for sockets: set TMPDIR to a shorter one, as /tmp is")
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        """Remove it. Calling it again does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
            sweep(Path(self.path).parent)


def sweep(where: Path) -> None:
    """Remove this user's folders of runs whose owners are gone."""
    for path in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has an owner, is another user's, or has just gone
            lock = _lock(str(path))
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: str) -> int:
    """A descriptor that holds the folder's lock; an ``OSError`` if somebody has it or the folder is gone."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_uid != os.geteuid() or not os.path.samestat(os.fstat(held), os.stat(path)):
            raise FileNotFoundError(f"{path} is not what it was")
    except OSError:
        os.close(held)
        raise
    return held
