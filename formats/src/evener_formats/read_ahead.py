"""Weight files are read from the disk while earlier weights are converted.

A loader asks for one tensor after another, and converts or copies each before it asks for the next. Without help the
disk waits meanwhile, as a mapped file is read when it is touched. So with each tensor the system is asked to bring the
next ones into its cache of files (``posix_fadvise``), also those at the begin of the files after it. What is there
already costs nearly nothing, and a wrong guess costs reading that may not have been needed.

A server's first process begins to read at once (``begin_reading``), while the engine's processes import their modules
and open their devices.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import NamedTuple

#: Bytes that are asked for ahead of the tensor in use: what a fast disk reads in some hundredths of a second.
WINDOW = 256 << 20
#: Bytes that are asked for at a time, where the window is ahead: each call may take Python's lock from the loader.
BATCH = 32 << 20
#: A checkpoint with fewer bytes is read at once anyway.
MIN_BYTES = 32 << 20
#: Bytes of one call: Linux reads no more than the device's read-ahead or its largest request, whichever is more. They
#: are seldom set below this, and no call should take long.
_STEP, _MOST = 128 << 10, 16 << 20
#: A call waits while the disk's queue is full, so threads make them.
_THREADS = 2
#: Of a whole model: threads, the share of the free memory that may be filled, and bytes of a file that are read before
#: all others: there are the names of its tensors, for which the engine would wait otherwise.
_MODEL_THREADS, _MEMORY_SHARE, _HEAD = 8, 0.5, 1 << 20


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
        following: files that are read after the one with these tensors.
    """

    def __init__(self, ranges: Mapping[str, FileRange], following: Sequence[Path] = ()) -> None:
        names = sorted(ranges, key=_natural)
        self._ranges = [ranges[name] for name in names]
        self._place = {name: place for place, name in enumerate(names)}
        #: Bytes of all tensors before each place, and of all in the end.
        self._before = list(accumulate((each.end - each.begin for each in self._ranges), initial=0))
        self._asked = bytearray(len(names))
        self._following, self._asked_after = following, 0
        self._run = range(0)
        self._pool: ThreadPoolExecutor | None = None

    def used(self, name: str) -> None:
        """The tensor ``name`` is read now: ask for it and for those after it."""
        if self._before[-1] < MIN_BYTES:
            return
        place = self._place[name]
        first = self._run.stop if place in self._run else place
        last = min(bisect_left(self._before, self._before[place + 1] + WINDOW), len(self._ranges))
        if first > place and last < len(self._ranges) and self._before[last] - self._before[first] < min(BATCH, WINDOW):
            return  # enough is under way
        self._run = range(place, max(first, last))
        new = [each for each in range(first, self._run.stop) if not self._asked[each]]
        for each in new:
            self._asked[each] = True
        for wanted in _joined([self._ranges[each] for each in new]):
            self._submit(wanted)
        self._ask_following(self._before[place + 1] + WINDOW - self._before[-1])
        if place == len(self._ranges) - 1 and self._pool is not None:
            self._pool.shutdown(wait=False)  # the threads end with what is left; a model may have a hundred files
            self._pool = None

    def _submit(self, wanted: FileRange) -> None:
        self._pool = self._pool or ThreadPoolExecutor(_THREADS, thread_name_prefix="evener-read-ahead")
        self._pool.submit(_ask, wanted)

    def _ask_following(self, nbytes: int) -> None:
        """Ask for the first ``nbytes`` of the files after this one, as far as they were not asked for."""
        if nbytes < self._asked_after + min(BATCH, WINDOW):
            return
        first = 0
        for file in self._following:
            if nbytes <= first:
                break
            last = first + _size(file)
            if (begin := max(first, self._asked_after)) < (end := min(last, nbytes)):
                self._submit(FileRange(file, begin - first, end - first))
                self._asked_after = end
            first = last

    def close(self) -> None:
        """Ask for nothing more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def begin_reading(model: Path) -> Sequence[Thread]:
    """Begin to bring the weights of a model into the system's cache of files, from the first on, as far as they take no
    more than a part of the free memory. Returns the threads, which end by themselves, and with the process."""
    files = weight_files(model)
    pieces = list(_pieces(files, int(_MEMORY_SHARE * _free_memory())))
    if sum(each.end - each.begin for each in pieces) < MIN_BYTES:
        return []
    heads, rest = iter(files), iter(pieces)

    def read() -> None:
        for file in heads:  # of an iterator over a list, each thread takes what is next
            _read_head(file)
        for piece in rest:
            _ask(piece)

    threads = [Thread(target=read, name="evener-read-model", daemon=True) for _ in range(_MODEL_THREADS)]
    for each in threads:
        each.start()
    return threads


def weight_files(model: Path) -> Sequence[Path]:
    """The files of a model's weights in the order of their names, numbers as numbers: a folder's safetensors files, or
    the model itself."""
    if model.is_file():
        return [model]
    return sorted(model.glob("model*.safetensors"), key=lambda file: _natural(file.name))


def _pieces(files: Sequence[Path], most: int) -> Iterator[FileRange]:
    """The first ``most`` bytes of the files."""
    for file in files:
        taken = min(_size(file), most)
        for begin in range(0, taken, _MOST):
            yield FileRange(file, begin, min(taken, begin + _MOST))
        most -= taken


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # who reads the tensors says what is wrong with the file


def _free_memory() -> int:
    """Bytes that the system can give without taking them from a process; 0 where it does not say."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def _read_head(file: Path) -> None:
    try:
        with file.open("rb", buffering=0) as opened:
            opened.read(_HEAD)
    except OSError:
        return  # who reads the file says what is wrong with it


def _joined(ranges: Sequence[FileRange]) -> Iterator[FileRange]:
    """The same bytes in the order of the files, neighbours in one."""
    last: FileRange | None = None
    for each in sorted(ranges):
        if last is not None and (each.file, each.begin) == (last.file, last.end):
            last = last._replace(end=each.end)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts by the numbers in a name; texts and numbers alternate, so they are never compared with each other."""
    return [(int(part[:18]), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _ask(wanted: FileRange) -> None:
    try:
        handle = os.open(wanted.file, os.O_RDONLY)
    except OSError:
        return  # who reads the tensor says what is wrong with the file
    try:
        step = _step(os.fstat(handle).st_dev)
        for begin in range(wanted.begin, wanted.end, step):
            os.posix_fadvise(handle, begin, min(step, wanted.end - begin), os.POSIX_FADV_WILLNEED)
    except OSError:
        return  # a file system that takes no such advice: the file is read when it is used
    finally:
        os.close(handle)


@cache
def _step(device: int) -> int:
    """Bytes that the system reads for one call on a device."""
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    found = [_STEP]
    for queue in (place / "queue", place.resolve().parent / "queue"):  # a partition has its disk's
        for name in ("read_ahead_kb", "max_sectors_kb"):
            try:
                found.append(1024 * int((queue / name).read_text()))
            except (OSError, ValueError):
                continue  # no such device, or no such limit
    return min(max(found), _MOST)
