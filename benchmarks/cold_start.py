"""Start of an engine whose weight files are on the disk only, beside a plain direct read of the same files.

    python benchmarks/cold_start.py MODEL... [--repeats 3] [--set KEY=VALUE] [--out FILE.jsonl]

MODEL is a folder or a ``.gguf`` file; ``quantized_checkpoint.py`` writes folders of any size. Before each reading all
pages of the files are dropped from the system's cache with ``posix_fadvise``; ``mincore`` shows that they are gone. The
direct read goes past that cache (``O_DIRECT``), with four threads. ``cold`` and ``warm`` are the seconds from the
process's begin, imports included, to an engine that is ready. Readings take turns; medians are printed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import OtherProcesses
from model_cache import once, record_models

READERS, CHUNK = 4, 4 << 20
#: Pages of a file that may stay in the cache: somebody else may have them mapped.
MAX_RESIDENT = 0.01


def weight_files(model: Path) -> list[Path]:
    """The files with weights of a folder, or the file itself."""
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def resident_share(file: Path) -> float:
    """Share of the pages of ``file`` that are in the system's cache."""
    size = file.stat().st_size
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        view = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(view), ctypes.c_size_t(size), pages)
        del view  # a buffer that is exported keeps the map open
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
    return sum(page & 1 for page in bytes(pages)) / len(pages)


def evict(files: Sequence[Path]) -> None:
    """Drop the files' pages from the system's cache.

    Raises:
        SystemExit: pages stay there.
    """
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not yet written stay
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (share := resident_share(file)) > MAX_RESIDENT:
            raise SystemExit(f"{share:.0%} of {file} stay in memory: end what uses it, and try again")


def direct_read(files: Sequence[Path]) -> float:
    """Seconds in which all bytes of the files are read with ``O_DIRECT``."""

    def read(file: Path, start: int) -> None:
        with mmap.mmap(-1, CHUNK) as buffer:  # aligned to a page, as O_DIRECT asks
            handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(handle, [buffer], start)
            finally:
                os.close(handle)

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        work = [pool.submit(read, file, at) for file in files for at in range(0, file.stat().st_size, CHUNK)]
        for each in work:
            each.result()
    return time.perf_counter() - began


def measure(model: str, keys: dict[str, str], repeats: int) -> dict[str, Any]:
    """Medians of one model."""
    files = weight_files(Path(model))
    times: dict[str, list[float]] = {"direct_s": [], "cold_s": [], "cold_weights_s": [], "warm_s": []}
    once(model, keys)  # fills the other caches
    with OtherProcesses() as others:
        for _ in range(repeats):
            evict(files)
            times["direct_s"].append(direct_read(files))
            evict(files)
            weights, ready, _ = once(model, keys)
            times["cold_s"].append(ready)
            times["cold_weights_s"].append(weights)
            times["warm_s"].append(once(model, keys)[1])
    middle = {name: round(statistics.median(found), 2) for name, found in times.items()}
    size = sum(file.stat().st_size for file in files)
    return {
        "model": Path(model).name, "gb": round(size / 1e9, 2), "keys": keys, **middle, "repeats": repeats,
        "disk_gb_s": round(size / 1e9 / middle["direct_s"], 2),
        "ratio": round(middle["cold_s"] / middle["direct_s"], 2), "other_cores": others.cores,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(record_models("cold_start.py", __doc__.splitlines()[0], measure, 3))
