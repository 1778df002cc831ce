"""Torch's libraries, loaded in a thread while a tokenizer is made and other modules are imported.

Loading them takes a sixth of ``import torch``. The C library's ``dlopen`` is called as a foreign function, which
releases the interpreter's lock. ``ctypes.CDLL`` would keep it until a library is loaded, and all else would wait.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

#: In the order of ``import torch``: what all others need comes first, and every library sees its names. These and what
#: they need know nothing of Python, so they can be loaded without the interpreter's lock.
_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL))


def load_ahead() -> Thread | None:
    """Begin to load them, if torch has not been imported and keeps them where its wheels for Linux do. A command calls
    this which surely imports torch in this process. Call it behind imports of other extension modules: the system's
    loader has a lock of its own, and they would wait. Returns the thread, which ends by itself; None if there is none.
    """
    found = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    places = [] if found is None else found.submodule_search_locations or []
    folders = [lib for place in places if _has_all(lib := Path(place, "lib"))]
    if not folders or (dlopen := getattr(ctypes.CDLL(None), "dlopen", None)) is None:
        return None
    thread = Thread(target=_load, args=(folders[0], dlopen), name="evener-libraries")
    thread.start()
    return thread


def _has_all(folder: Path) -> bool:
    return all((folder / name).is_file() for name, _ in _LIBRARIES)


def _load(folder: Path, dlopen: Callable[[bytes, int], int]) -> None:
    # If one fails, ``import torch`` meets the same and says it, in the thread that can report it.
    for name, mode in _LIBRARIES:
        dlopen(bytes(folder / name), os.RTLD_NOW | mode)
