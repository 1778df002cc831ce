"""Python's garbage collector. It looks at every object again and again while a start makes millions that stay, and
twice more when the process ends. Each look takes half a second, where a short answer takes three in all."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without collections inside; may be nested."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Collections inside do not look at objects made before: nearly all objects of a start stay, and the first look at
    them would take a tenth of a second, in the middle of answers."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def end_without_collection() -> None:
    """Let this process end without a last look at objects whose memory the system takes back anyway. Until then
    nothing changes."""
    atexit.register(gc.freeze)
