"""Time how long the host takes to submit copies of experts to an NVIDIA device, and how fast they are.

    python benchmarks/batch_copies.py [--experts 36] [--tensors 1572864,196608,49152,786432,98304,24576]

An expert has a tensor of each size in page-locked memory; every second expert is copied to a slot, so that no two are
one copy. Each row is a way of submitting them to a stream that is idle, or that copies something else for a
millisecond: a ``kernel`` of so many programs that reads the host's memory, ``batches`` of so many copies
(``cuMemcpyBatchAsync``), ``engines for large ones`` by batches and a kernel for the others, as experts are copied, or
``single`` calls. ``product_us`` is what products of matrices take meanwhile on another stream, and alone. Rows go to
standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import after_stdlib  # noqa: F401
import numpy as np
import torch

from evener_backend_cuda import many_copies
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.many_copies import ManyCopies, Numbers, one_by_one, open_driver

#: The sizes of an expert of Qwen3-30B-A3B in Q4_K, as the Triton kernels read it.
SIZES = "1572864,196608,49152,786432,98304,24576"
REPEATS, BATCHES, PROGRAMS = 7, (32, 64, 1024), (4, 8, 16, 32, 64)
#: Addresses to copy to and from, bytes, and the stream.
Submit = Callable[[Numbers, Numbers, Numbers, int], object]


def ways() -> Mapping[str, Submit]:
    """All ways of submitting copies."""
    kernels, most = Driver("sm_{}{}".format(*torch.cuda.get_device_capability())), 1 << 62
    found: dict[str, Submit] = {"engines for large ones": ManyCopies(kernels)}
    found |= {f"kernel of {count} programs": ManyCopies(kernels, large=most, programs=count) for count in PROGRAMS}
    found |= {f"batches of {count}": partial(batched, count, ManyCopies(kernels, large=0)) for count in BATCHES}
    return {**found, "single": partial(one_by_one, open_driver())}


def batched(count: int, way: Submit, to: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
    """Batches of so many."""
    with patch.object(many_copies, "BATCH", count):
        way(to, sources, sizes, stream)


def main(argv: Sequence[str]) -> int:
    """Print the rows; 1 if a copy was wrong."""
    args = parser().parse_args(argv)
    sizes = [int(size) for size in args.tensors.split(",")]
    sources = [torch.randint(0, 255, (2 * args.experts, size), dtype=torch.uint8).pin_memory() for size in sizes]
    targets = [torch.zeros(args.experts, size, dtype=torch.uint8, device="cuda") for size in sizes]
    other = torch.zeros(48 << 20, dtype=torch.uint8).pin_memory()
    elsewhere, stream = torch.empty_like(other, device="cuda"), torch.cuda.Stream()
    first, begin = (np.array([t.data_ptr() for t in all_], np.uint64) for all_ in (targets, sources))
    size, slots = np.array(sizes, np.uint64), np.arange(args.experts, dtype=np.uint64)[:, None]
    to, places = (first + slots * size).ravel(), (begin + np.uint64(2) * slots * size).ravel()
    counts = np.tile(size, args.experts)
    wrong, alone = 0, product_us(lambda: None)
    for busy, (name, way) in ((b, w) for b in (False, True) for w in ways().items()):

        def submit(way: Submit = way) -> None:
            with torch.cuda.stream(stream):
                way(to, places, counts, stream.cuda_stream)

        def copies_first(busy: bool = busy) -> None:
            if busy:
                with torch.cuda.stream(stream):
                    elsewhere.copy_(other, non_blocking=True)

        for target in targets:
            target.zero_()
        submitted, done = timed(submit, copies_first)
        right = all(torch.equal(t.cpu(), s[::2]) for t, s in zip(targets, sources, strict=True))
        wrong |= not right
        print(json.dumps({
            "stream": "busy" if busy else "idle", "copies": len(to), "way": name, "right": right,
            "submitted_us": round(1e6 * submitted), "done_us": round(1e6 * done),
            "gb_s": None if busy else round(float(counts.sum()) / done / 1e9, 1),
            "product_us": round(product_us(submit)), "product_alone_us": round(alone),
        }), flush=True)  # fmt: skip
    return int(wrong)


def product_us(before: Callable[[], object]) -> float:
    """Microseconds of products of matrices that use the whole device, submitted right after ``before``: the fastest."""
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    times: list[Any] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        before()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(8):
            a @ a
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return 1e3 * float(min(times))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--experts", type=int, default=36)
    made.add_argument("--tensors", default=SIZES, help="bytes of each tensor of an expert")
    return made


def timed(submit: Callable[[], None], before: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the host has submitted the copies, and until they are done: the fastest."""
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        before()
        began = time.perf_counter()
        submit()
        submitted = time.perf_counter() - began
        torch.cuda.synchronize()
        found.append((submitted, time.perf_counter() - began))
    submitted, done = (min(each) for each in zip(*found, strict=True))
    return submitted, done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
