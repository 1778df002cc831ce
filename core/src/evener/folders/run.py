"""Folders for the files of one run: sockets and scratch files. A killed process leaves its folder behind; the next
process that starts or ends removes it.

The owner holds a lock on its folder. The kernel releases the lock however the owner ends, so a folder without a lock
is stale. The owner cannot do it alone: a process that dies with its parent may stop at any instruction.
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
    """A new folder that only this user can open. Creating one and closing one also removes stale folders: so a process
    that kills its children removes theirs.

    Attributes:
        path: path of the folder.

    Raises:
        OSError: no space is left, or the file system has no locks.
    """

    def __init__(self) -> None:
        remove_stale_folders(Path(tempfile.gettempdir()))
        self._lock: int | None = None
        while self._lock is None:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            # Another process may find the folder before it is locked, and remove it: then try again.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                self._lock = _lock(self.path)

    def socket(self, name: str) -> str:
        """The address of a socket in the folder.

        Raises:
            ConfigError: the path is too long for a socket.
        """
        if len(os.fsencode(self.path)) > 80:  # The limit is about 104 bytes, with the socket's name.
            raise ConfigError(f"the path {self.path} is too long for sockets: set TMPDIR to a shorter one, as /tmp")
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        """Remove the folder. Calling it again does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
            remove_stale_folders(Path(self.path).parent)


def remove_stale_folders(where: Path) -> None:
    """Remove this user's folders in ``where`` that no running process owns."""
    for path in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is locked, belongs to another user, or was just removed
            lock = _lock(str(path))
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: str) -> int:
    """A file descriptor that holds the folder's lock; ``OSError`` if another process holds it or the folder is gone."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_uid != os.geteuid() or not os.path.samestat(os.fstat(held), os.stat(path)):
            raise FileNotFoundError(f"{path} was replaced")
    except OSError:
        os.close(held)
        raise
    return held
