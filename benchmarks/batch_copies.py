"""Time how long the host takes to submit copies of experts to an NVIDIA device, and how fast they are.

    python benchmarks/batch_copies.py [--experts 36] [--tensors 1572864,196608,49152,786432,98304,24576]

An expert has a tensor of each size in page-locked memory; every second expert is copied to a slot, so that no two are
one copy. Orders: ``expert`` by expert, ``tensor`` by tensor. Each row is a way of submitting them to a stream that is
idle, or that copies something else for a millisecond: ``batches`` of so many copies (``cuMemcpyBatchAsync``), or
``single`` calls. Rows go to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import after_stdlib  # noqa: F401
import numpy as np
import torch

from evener_backend_cuda import many_copies

#: The sizes of an expert of Qwen3-30B-A3B in Q4_K, as the Triton kernels read it.
SIZES = "1572864,196608,49152,786432,98304,24576"
REPEATS, BATCHES = 7, (32, 64, 128, 1 << 20)


def main(argv: Sequence[str]) -> int:
    """Print the rows; 1 if a copy was wrong."""
    args = parser().parse_args(argv)
    sizes = [int(size) for size in args.tensors.split(",")]
    sources = [torch.randint(0, 255, (2 * args.experts, size), dtype=torch.uint8).pin_memory() for size in sizes]
    targets = [torch.zeros(args.experts, size, dtype=torch.uint8, device="cuda") for size in sizes]
    other = torch.zeros(48 << 20, dtype=torch.uint8).pin_memory()
    elsewhere, stream = torch.empty_like(other, device="cuda"), torch.cuda.Stream()
    to, begin = (np.array([t.data_ptr() for t in all_], np.uint64) for all_ in (targets, sources))
    size, slots = np.array(sizes, np.uint64), np.arange(args.experts, dtype=np.uint64)[:, None]
    by_expert = to + slots * size, begin + np.uint64(2) * slots * size, np.broadcast_to(size, (args.experts, len(size)))
    wrong = 0
    for order, busy, most in ((o, b, m) for o in ("expert", "tensor") for b in (False, True) for m in (*BATCHES, 0)):
        lists = [np.ascontiguousarray(each if order == "expert" else each.T).ravel() for each in by_expert]

        def submit(most: int = most, lists: Sequence[many_copies.Numbers] = lists) -> None:
            there, here, counts = lists
            if not most:
                many_copies.one_by_one(many_copies.open_driver(), there, here, counts, stream.cuda_stream)
                return
            with patch.object(many_copies, "MOST", most):
                many_copies.ManyCopies()(there, here, counts, stream.cuda_stream)

        def copies_first(busy: bool = busy) -> None:
            if busy:
                elsewhere.copy_(other, non_blocking=True)

        for target in targets:
            target.zero_()
        with torch.cuda.stream(stream):
            submitted, done = timed(submit, copies_first)
        right = all(torch.equal(t.cpu(), s[::2]) for t, s in zip(targets, sources, strict=True))
        wrong |= not right
        print(json.dumps({
            "order": order, "stream": "busy" if busy else "idle", "copies": len(lists[0]),
            "way": "single" if not most else f"batches of {min(most, len(lists[0]))}", "right": right,
            "submitted_us": round(1e6 * submitted), "done_us": round(1e6 * done),
        }), flush=True)  # fmt: skip
    return int(wrong)


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
