"""Weight files are read from the disk while earlier weights are converted.

A loader asks for one tensor after another, and converts or copies each before it asks for the next. Without help the
disk waits meanwhile, as a mapped file is read when it is touched. So with each tensor the system is asked to bring the
next ones into its cache of files (``posix_fadvise``). What is there already costs nearly nothing, and a wrong guess
costs reading that may not have been needed.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

#: Bytes that are asked for ahead of the tensor in use: what a fast disk reads in some hundredths of a second.
WINDOW = 256 << 20
#: A checkpoint with fewer bytes is read at once anyway.
MIN_BYTES = 32 << 20
#: Bytes of one call. Linux reads no more than the read-ahead of the device, which is seldom set below this.
_STEP = 128 << 10
#: A call waits while the disk's queue is full, so threads make them.
_THREADS = 2


class FileRange(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file."""

    file: Path
    begin: int
    end: int


class ReadAhead:
    """The tensors of a checkpoint in the order in which models read them: by name, numbers as numbers, so that layer 10
    comes after layer 9.

    Args:
        ranges: where each tensor lies.
    """

    def __init__(self, ranges: Mapping[str, FileRange]) -> None:
        names = sorted(ranges, key=_natural)
        self._ranges = [ranges[name] for name in names]
        self._place = {name: place for place, name in enumerate(names)}
        #: Bytes of all tensors before each place, and of all in the end.
        self._before = list(accumulate((each.end - each.begin for each in self._ranges), initial=0))
        self._asked = bytearray(len(names))
        self._run = range(0)
        self._pool: ThreadPoolExecutor | None = None

    def used(self, name: str) -> None:
        """The tensor ``name`` is read now: ask for it and for those after it."""
        if self._before[-1] < MIN_BYTES:
            return
        place = self._place[name]
        first = self._run.stop if place in self._run else place
        last = bisect_left(self._before, self._before[place + 1] + WINDOW)
        self._run = range(place, max(first, min(last, len(self._ranges))))
        for new in range(first, self._run.stop):
            if not self._asked[new]:
                self._asked[new] = True
                self._pool = self._pool or ThreadPoolExecutor(_THREADS, thread_name_prefix="evener-read-ahead")
                self._pool.submit(_ask, self._ranges[new])
        if self._run.stop == len(self._ranges) and self._pool is not None:
            self._pool.shutdown(wait=False)  # the threads end with what is left; a model may have a hundred files
            self._pool = None

    def close(self) -> None:
        """Ask for nothing more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts by the numbers in a name; texts and numbers alternate, so they are never compared with each other."""
    return [(int(part[:18]), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _ask(wanted: FileRange) -> None:
    try:
        handle = os.open(wanted.file, os.O_RDONLY)
    except OSError:
        return  # who reads the tensor says what is wrong with the file
    try:
        for begin in range(wanted.begin, wanted.end, _STEP):
            os.posix_fadvise(handle, begin, min(_STEP, wanted.end - begin), os.POSIX_FADV_WILLNEED)
    except OSError:
        return  # a file system that takes no such advice: the file is read when it is used
    finally:
        os.close(handle)
