"""Start of an engine whose weight files are on the disk only, beside a plain direct read of the same files.

    python benchmarks/cold_start.py MODEL... [--repeats 3] [--set KEY=VALUE] [--out FILE.jsonl]

MODEL is a folder or a ``.gguf`` file; ``quantized_checkpoint.py`` writes folders of any size. Before each reading all
pages of the files are dropped from the system's cache with ``posix_fadvise``; ``mincore`` shows that they are gone. The
direct read goes past that cache (``O_DIRECT``), with the threads and sizes of reads that were fastest for the first
gigabytes. ``cold`` and ``warm`` are the seconds from the process's begin, imports included, to an engine that is ready,
and ``parts`` says where they go (``start_parts.py``). Readings take turns; medians are printed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import OtherProcesses
from model_cache import record_models

#: Threads and bytes of a read that are tried, and how many bytes are read to choose.
TRIED = ((4, 4 << 20), (16, 4 << 20), (32, 1 << 20), (32, 8 << 20), (64, 8 << 20))
SAMPLE = 1 << 30
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


def direct_read(files: Sequence[Path], readers: int, chunk: int, most: int | None = None) -> float:
    """Seconds in which all bytes of the files, or the first ``most``, are read with ``O_DIRECT``."""

    def read(file: Path, start: int) -> None:
        with mmap.mmap(-1, chunk) as buffer:  # aligned to a page, as O_DIRECT asks
            handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(handle, [buffer], start)
            finally:
                os.close(handle)

    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, chunk)]
    began = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        for each in [pool.submit(read, *piece) for piece in pieces[: most and most // chunk]]:
            each.result()
    return time.perf_counter() - began


def fastest_reading(files: Sequence[Path]) -> tuple[int, int]:
    """Threads and bytes of a read with which the disk is fastest. Each is tried twice, in turns."""
    seconds: dict[tuple[int, int], list[float]] = {each: [] for each in TRIED}
    for _ in range(2):
        for each, found in seconds.items():
            found.append(direct_read(files, *each, SAMPLE))
    return min(seconds, key=lambda each: min(seconds[each]))


def start(model: str, keys: dict[str, str]) -> dict[str, Any]:
    """What ``start_parts.py`` says of one start in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("start_parts.py")), model, json.dumps(keys)]
    done = subprocess.run([*command, str(time.time())], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model} did not start:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, keys: dict[str, str], repeats: int) -> dict[str, Any]:
    """Medians of one model, and the parts of the median start."""
    files = weight_files(Path(model))
    times: dict[str, list[float]] = {"direct_s": [], "cold_s": [], "cold_weights_s": [], "warm_s": []}
    starts = []
    start(model, keys)  # fills the other caches
    evict(files)
    reading = fastest_reading(files)
    with OtherProcesses() as others:
        for _ in range(repeats):
            evict(files)
            times["direct_s"].append(direct_read(files, *reading))
            evict(files)
            starts.append(start(model, keys))
            times["cold_s"].append(starts[-1]["ready_s"])
            times["cold_weights_s"].append(starts[-1]["weights_s"])
            times["warm_s"].append(start(model, keys)["ready_s"])
    middle = {name: round(statistics.median(found), 2) for name, found in times.items()}
    size = sum(file.stat().st_size for file in files)
    typical = sorted(starts, key=lambda each: each["ready_s"])[len(starts) // 2]
    return {
        "model": Path(model).name, "engine_device": typical["device"], "gb": round(size / 1e9, 2), "keys": keys,
        **middle, "repeats": repeats,
        "disk_gb_s": round(size / 1e9 / middle["direct_s"], 2), "direct_threads": reading[0],
        "direct_read_mib": reading[1] >> 20, "ratio": round(middle["cold_s"] / middle["direct_s"], 2),
        "parts": {part: round(seconds, 2) for part, seconds in typical["parts"].items()}, "other_cores": others.cores,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(record_models("cold_start.py", __doc__.splitlines()[0], measure, 3))
