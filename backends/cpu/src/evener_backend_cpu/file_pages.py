"""Pages of a weight file, given back while its largest weights are packed.

A weight is read from a mapped file and packed into other memory. The pages that were read would stay in this process's
memory until the mapping ends, so a large weight would take twice its size. Given back, they are still in the system's
cache of files, and are there again when they are read.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import torch

#: Weights of fewer bytes are read at once: to ask the system about a mapping takes some milliseconds.
LEAST_BYTES = 32 << 20
#: Bytes that are read before their pages are given back.
STRIP_BYTES = 8 << 20
_MAPPINGS = Path("/proc/self/smaps")
#: A mapping begins with its addresses, permissions, offset, device and inode, and a file's with its path.
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)?$", re.MULTILINE)


def strips(stored: torch.Tensor, unit: int) -> Iterator[torch.Tensor]:
    """The rows of ``stored``, some after others, in multiples of ``unit`` rows but for the last. If they lie in a
    mapped file, the pages of some are given back when the next are asked for; else all rows come at once.

    Args:
        stored: contiguous, [rows, …].
    """
    if stored.nbytes < LEAST_BYTES or not in_unchanged_file(stored):
        yield stored
        return
    step = unit * max(1, STRIP_BYTES // (unit * stored[0].nbytes))
    _give_back(stored)
    for first in range(0, len(stored), step):
        rows = stored[first : first + step]
        yield rows
        _give_back(rows)


def in_unchanged_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in one mapping of a file, of which this process has changed no page; False where the system
    does not say."""
    if not _MAPPINGS.exists():
        return False
    text, first = _MAPPINGS.read_text(encoding="utf-8", errors="replace"), tensor.data_ptr()
    for found in _MAPPING.finditer(text):
        begin, end = int(found[1], 16), int(found[2], 16)
        if begin <= first < end:
            # Pages that were written are this process's own, which the system calls anonymous.
            changed = re.compile(r"^Anonymous: +(\d+) kB$", re.MULTILINE).search(text, found.end())
            return found[3] is not None and first + tensor.nbytes <= end and changed is not None and changed[1] == "0"
    return False


def _give_back(rows: torch.Tensor) -> None:
    begin, end = rows.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, rows.data_ptr() + rows.nbytes
    # Only advice: where it is not taken, the pages stay.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
