"""Torch's libraries, loaded in a thread while Python imports other modules.

Loading them takes a sixth of ``import torch``. Here the system's loader runs without Python's
locks, which an import would hold.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from threading import Thread

#: In the order of ``import torch``: what all others need comes first, and every library sees its names.
_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.RTLD_LOCAL))


def load_ahead() -> Thread | None:
    """Begin to load them, if torch has not been imported and keeps them where its wheels for Linux do. A command calls
    this which surely imports torch in this process. Returns the thread, which ends by itself; None if there is none."""
    found = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    places = [] if found is None else found.submodule_search_locations or []
    folders = [lib for place in places if _has_all(lib := Path(place, "lib"))]
    if not folders:
        return None
    thread = Thread(target=_load, args=(folders[0],), name="evener-libraries")
    thread.start()
    return thread


def _has_all(folder: Path) -> bool:
    return all((folder / name).is_file() for name, _ in _LIBRARIES)


def _load(folder: Path) -> None:
    for name, mode in _LIBRARIES:
        try:
            ctypes.CDLL(str(folder / name), mode)
        except OSError:
            # ``import torch`` meets the same and says it, in the thread that can report it.
            return
