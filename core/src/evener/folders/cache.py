"""The cache folder, for files that can be made again: probe results, kernel timings, compiled code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(part: str, environ: Mapping[str, str] | None = None) -> Path:
    """``$XDG_CACHE_HOME/evener/<part>``, or ``~/.cache/evener/<part>``; it is not created here.

    Args:
        environ: where ``XDG_CACHE_HOME`` is read; default ``os.environ``.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evener" / part


def is_trusted(file: Path) -> bool:
    """Whether ``file`` is this user's, or root's, and not everybody may write it: others may have put files there.

    Raises:
        OSError: there is no such file.
    """
    status = file.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o002


def make_private(folder: Path) -> None:
    """Create ``folder`` and what is missing above it, so that only this user can write there, whatever the umask is.
    Write permission that others have for a folder that is there already is taken away.

    Raises:
        OSError: it cannot be created, or belongs to another user, who could replace the files in it.
    """
    for level in reversed((folder, *folder.parents)):
        if not level.exists():
            level.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user; remove it, or set XDG_CACHE_HOME to another folder")
    if status.st_mode & 0o022:
        folder.chmod(0o700)
