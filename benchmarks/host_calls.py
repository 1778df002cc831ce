"""Time calls of the host in a captured graph: N in a row, each after some work of the device.

    python benchmarks/host_calls.py [--calls 21] [--between 0,100] [--rows 1]

Ways: ``driver``: a thread of the driver calls Python (``cuLaunchHostFunc``); ``driver_empty``: it calls a function that
does nothing; ``memory``: stream memory operations write a word and wait for another, and a thread of this process waits
for the first one; ``batch``: the same in one node; ``kernel``: a kernel of one thread does it. ``+copies``: with copies
of a layer's rows (2,048 bfloat16), ids and weights to the host, and of its result back. ``fused``: one kernel does all.
A row has the microseconds that a call adds to the device's work. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch

HIDDEN, TOP = 2048, 8
SOURCE = """
extern "C" __global__ void signal_and_wait(unsigned* ready, unsigned* done, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(ready), "r"(value) : "memory");
    unsigned seen;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(done) : "memory"); while (seen == 0);
    asm volatile("st.relaxed.sys.global.u32 [%0], 0;" :: "l"(done) : "memory");
}
extern "C" __global__ void fused(unsigned* ready, unsigned* done, unsigned value, const int4* x, int4* to_x,
                                 const int4* rest, int4* to_rest, const int4* found, int4* result, int n, int m) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) to_x[i] = x[i];
    for (int i = threadIdx.x; i < m; i += blockDim.x) to_rest[i] = rest[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(ready), "r"(value) : "memory");
        unsigned seen;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(done) : "memory"); while (seen == 0);
        asm volatile("st.relaxed.sys.global.u32 [%0], 0;" :: "l"(done) : "memory");
    }
    __syncthreads();
    __threadfence_system();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int4 v;
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(found + i) : "memory");
        result[i] = v;
    }
}
"""
LIBC = ctypes.CDLL(None)
DRIVER = ctypes.CDLL("libcuda.so.1")
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def checked(code: int) -> None:
    if code:
        raise RuntimeError(f"the driver failed with error {code}")


class Op(ctypes.Structure):
    """One operation of ``cuStreamBatchMemOp``."""

    _fields_ = (("operation", ctypes.c_int), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
                ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64), ("pad", ctypes.c_uint64))  # fmt: skip


class Words:
    """A word for each call in each direction, each in a cache line of its own, and the thread that answers."""

    def __init__(self, count: int, work: Callable[[], None]) -> None:
        self.words = torch.zeros(count, 2, 16, dtype=torch.int32, pin_memory=True)
        self.ready, self.done = ([word.data_ptr() for word in self.words[:, side]] for side in (0, 1))
        word = ctypes.c_int.from_address(self.ready[0])
        LIBC.pthread_spin_init(ctypes.byref(word), 0)
        self.unlocked = word.value & 0xFFFFFFFF
        for address in self.ready:
            ctypes.c_int.from_address(address).value = self.unlocked
            LIBC.pthread_spin_lock(ctypes.c_void_p(address))
        self.replays: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.work = work
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self) -> None:
        lock, work = LIBC.pthread_spin_lock, self.work
        pairs = [(ctypes.c_void_p(a), ctypes.c_int.from_address(b)) for a, b in zip(self.ready, self.done, strict=True)]
        while self.replays.get():
            for ready, done in pairs:
                lock(ready)
                work()
                done.value = 1


def main(argv: Sequence[str]) -> int:
    """Print a row for each combination."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--calls", type=int, default=21)
    made.add_argument("--between", default="0,100", help="microseconds of device work before each call")
    made.add_argument("--rows", default="1,16")
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = made.parse_args(argv)
    kernel, fused = (torch.cuda._compile_kernel(SOURCE, name) for name in ("signal_and_wait", "fused"))
    count = [0]

    def work() -> None:
        count[0] += 1

    python, nothing = HOST_FUNCTION(lambda _: work()), ctypes.cast(LIBC.getpid, HOST_FUNCTION)
    DRIVER.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p)
    words = Words(args.calls, work)
    write, wait, batch = (getattr(DRIVER, f"{name}_v2") for name in
                          ("cuStreamWriteValue32", "cuStreamWaitValue32", "cuStreamBatchMemOp"))  # fmt: skip
    for call in (write, wait):
        call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    batch.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)

    def memory(n: int, stream: int) -> None:
        checked(write(stream, words.ready[n], words.unlocked, 0))
        checked(wait(stream, words.done[n], 1, 1))
        checked(write(stream, words.done[n], 0, 0))

    def batched(n: int, stream: int) -> None:
        ops = (Op * 3)(Op(2, words.ready[n], words.unlocked), Op(1, words.done[n], 1, 1), Op(2, words.done[n], 0))
        checked(batch(stream, 3, ops, 0))

    def by_kernel(n: int, stream: int) -> None:
        del stream
        kernel((1, 1, 1), (1, 1, 1), (words.words[n, 0], words.words[n, 1], words.unlocked))

    ways: dict[str, Callable[[int, int], None]] = {
        "none": lambda n, stream: None,
        "driver": lambda n, stream: checked(DRIVER.cuLaunchHostFunc(stream, python, None)),
        "driver_empty": lambda n, stream: checked(DRIVER.cuLaunchHostFunc(stream, nothing, None)),
        "memory": memory, "batch": batched, "kernel": by_kernel,
    }  # fmt: skip
    cycles = cycles_of_us()
    for rows in (int(n) for n in args.rows.split(",")):
        with_rows = Rows(rows, words, fused)
        more = {f"{name}+copies": with_rows.copies(way) for name, way in ways.items()}
        for between in (int(n) for n in args.between.split(",")):
            base: float = 0
            for name, way in {**ways, **more, "fused": with_rows.fused}.items():
                answered = not name.startswith(("none", "driver"))
                us = timed(way, args.calls, between * cycles, words if answered else None)
                base = us if name == "none" else base  # the device's own work
                row = {"way": name, "rows": rows, "between_us": between, "us_a_call": round(us - base, 2)}
                print(json.dumps(row), flush=True)
                with (args.out / "host_calls.jsonl").open("a") as file:
                    file.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")
            with_rows.check()
    return 0


class Rows:
    """Rows of a layer, ids and weights of their experts, and the memory of the host that they are copied to."""

    def __init__(self, rows: int, words: Words, kernel: Any) -> None:
        self._words, self._kernel = words, kernel
        self._x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        self._rest = torch.zeros(2, rows, TOP, dtype=torch.int32, device="cuda")
        self._result = torch.empty_like(self._x)
        self._to_x, self._to_rest, self._found = (
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (self._x, self._rest, self._x)
        )
        self._found.copy_(torch.randn(rows, HIDDEN))

    def copies(self, way: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """``way`` between copies."""

        def both(n: int, stream: int) -> None:
            self._to_x.copy_(self._x, non_blocking=True)
            self._to_rest[0].copy_(self._rest[0], non_blocking=True)
            self._to_rest[1].copy_(self._rest[1], non_blocking=True)
            way(n, stream)
            self._result.copy_(self._found, non_blocking=True)

        return both

    def fused(self, n: int, stream: int) -> None:
        """Call ``n`` by the kernel that copies, too."""
        del stream
        ready, done = self._words.words[n]
        self._kernel((1, 1, 1), (512, 1, 1), (
            ready, done, self._words.unlocked, self._x, self._to_x, self._rest, self._to_rest, self._found,
            self._result,
            self._x.nbytes // 16, self._rest.nbytes // 16,
        ))  # fmt: skip

    def check(self) -> None:
        """The copies equal their sources."""
        if not torch.equal(self._result.cpu(), self._found) or not torch.equal(self._to_x, self._x.cpu()):
            raise SystemExit("wrong bytes were copied")


def cycles_of_us() -> float:
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return 100.0 / (time.perf_counter() - began)


def timed(way: Callable[[int, int], None], calls: int, cycles: float, words: Words | None) -> float:
    """Median microseconds of a replay, for each call."""
    graph, one = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        for n in range(calls):
            if cycles:
                torch.cuda._sleep(int(cycles))
            one.add_(1)
            way(n, torch.cuda.current_stream().cuda_stream)
    times = []
    for _ in range(40):
        began = time.perf_counter()
        graph.replay()
        if words is not None:
            words.replays.put(True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[8:]) * 1e6 / calls


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
