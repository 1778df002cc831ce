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
