"""Time ways in which programs that stream weights give each other a vector, on a GPU with compute capability 9.0.

    python benchmarks/exchange_latency.py [WAY ...] [--out FILE.jsonl]

Each program has a multiprocessor and reads weights from memory through a ring, as ``one_token.cu`` does. About every
20 microseconds each has a part of 12,288 numbers of two bytes, and goes on when it has all of them. WAY is
KERNEL/CLUSTER/FLIGHT/AHEAD: programs of a cluster, tiles of 16 KB that a program asks for at once, and tiles of the
next round that it asks for before an exchange ends ("all": as the ring has room). Kernels:

none, idle: no exchange. idle leaves one program of each cluster, its leader, without weights; so do those below.
probe: no exchange. One thread of a program times single accesses: a load from the card's cache, a fence behind a store
there, and loads from the shared memory of another program that streams (neighbour) and of the leader.
messages: 16 bytes each with a mark, read by all programs, as in one_token.cu.
counted, counted-bulk: parts without marks and one counter; read by loads, or by bulk copies.
parts-push, parts-multicast: a program reads its share of the messages, and gives it to its cluster: from its shared
memory, or by a copy from the card's cache to all of the cluster.
leader-push, leader-scatter, leader-multicast, leader-counted: the leader reads all messages. It copies all of them to
each program, or a piece to each, which hands it on, or has the cache send them to all of its cluster. leader-counted is
leader-scatter with a counter and bulk copies.

A row for each way:

us, tb_s: microseconds of a round, and the speed of reading meanwhile.
cycles: least, median, most from before a part is written to the whole vector in shared memory.
last_cycles: the same of the program that waits least in a round, median of the rounds.
after_last_ns: from the last part of a round to the whole vector in a program's shared memory; least, median, most.
gathered_ns: the same of leaders.
wrong: words that were not those of their round.

Every wait of a kernel ends after 0.14 s: the launch fails, and the next ways run in another process.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch
from machine import record

from evener_backend_cuda.compiled import CompiledKernel, Driver, _check, _cuda

#: Functions of exchange_latency.cu.
KERNELS: Mapping[str, str] = {
    "none": "none", "idle": "none", "probe": "probe", "messages": "messages", "counted": "counted",
    "counted-bulk": "counted_bulk", "parts-push": "parts_push", "parts-multicast": "parts_multicast",
    "leader-push": "leader_push", "leader-scatter": "leader_scatter", "leader-multicast": "leader_multicast",
    "leader-counted": "leader_counted",
}  # fmt: skip
#: As in exchange_latency.cu, which checks the size of shared memory.
STAGES, TILE, MESSAGES, COPIES, THREADS = 10, 16384, 2048, 4, 320
SHARED = STAGES * TILE + 2 * MESSAGES * 16 + (2 * STAGES + 5) * 8
PROGRAMS, ROUNDS, WARM = 128, 200, 8
#: Tiles of all programs between exchanges: 90 MB, 20 microseconds at 4.5 TB/s.
TILES = 43 * PROGRAMS
WEIGHTS = 2 << 30
CLUSTERS = (8, 16)
_LEADERS = ("leader-push", "leader-scatter", "leader-multicast", "leader-counted")
WAYS = (
    "none/1/10/all", "none/1/4/all", "none/1/2/all", *(f"idle/{c}/10/all" for c in CLUSTERS),
    *(f"probe/1/{n}/all" for n in (0, 1, 2, 4, 10)), *(f"probe/{c}/{n}/all" for c in CLUSTERS for n in (0, 10)),
    *(f"messages/1/{n}/all" for n in (10, 6, 4, 2, 1)), *(f"messages/1/10/{n}" for n in (5, 2, 0)),
    "counted/1/10/all", "counted-bulk/1/10/all", "counted/1/2/all", "counted-bulk/1/2/all",
    *(f"messages/{c}/10/all" for c in CLUSTERS),
    *(f"parts-{how}/{c}/10/all" for how in ("push", "multicast") for c in CLUSTERS),
    *(f"{name}/{c}/10/all" for name in _LEADERS for c in CLUSTERS),
    *(f"leader-scatter/{c}/4/all" for c in CLUSTERS),
)  # fmt: skip
#: Attributes of the driver: of a function, more than eight programs in a cluster; of a launch, the size of a cluster.
_LARGE_CLUSTERS, _CLUSTER = 14, 4
_PROBED = ("load", "fence", "neighbour", "leader")


@dataclass(frozen=True)
class Way:
    """One way of exchanging. ``ahead`` None: as many tiles as the ring has room for."""

    kernel: str
    cluster: int
    flight: int
    ahead: int | None

    @classmethod
    def of(cls, text: str) -> Way:
        """Raises ValueError with what a way looks like."""
        try:
            kernel, cluster, flight, ahead = text.split("/")
            way = cls(kernel, int(cluster), int(flight), None if ahead == "all" else int(ahead))
        except ValueError:
            raise ValueError(f"{text}: a way is KERNEL/CLUSTER/FLIGHT/AHEAD, such as {WAYS[-1]}") from None
        if reason := way._refusal():
            raise ValueError(f"{text}: {reason}")
        return way

    def _refusal(self) -> str | None:
        if self.kernel not in KERNELS:
            return f"kernels are {', '.join(KERNELS)}"
        shared_out = self.kernel.startswith(("leader", "parts", "idle"))
        if self.cluster not in (CLUSTERS if shared_out else (1, *CLUSTERS)):
            return f"clusters have {', '.join(map(str, CLUSTERS))} programs{'' if shared_out else ', or 1'}"
        if not (self.kernel != "probe") <= self.flight <= STAGES:
            return f"at most {STAGES} tiles are under way, at least 1 (0: probe)"
        if self.ahead is not None and self.ahead < 0:
            return "AHEAD is a number of tiles, or all"
        return None

    @property
    def leads(self) -> bool:
        """Whether one program of each cluster has no weights."""
        return self.kernel.startswith(("leader", "idle")) or (self.kernel == "probe" and self.cluster > 1)

    def workers(self, clusters: int) -> int:
        """Programs that stream."""
        return clusters * (self.cluster - self.leads)


class Asked(ctypes.Structure):
    """``Asked`` of exchange_latency.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in
          ("weights", "messages", "vector", "counter", "stamps", "report", "errors", "sink")),
        *((name, ctypes.c_uint) for name in ("tiles", "rounds", "flight", "ahead", "taken", "blocks", "leads")),
    ]  # fmt: skip


class ClusterKernel(CompiledKernel):
    """A kernel whose programs are launched in clusters of this size, so many of them."""

    def __init__(self, binary: bytes, name: str, cluster: int, clusters: int = 1) -> None:
        super().__init__(binary, name, cluster * clusters, THREADS, SHARED, early=False)
        if cluster > 1:
            _check(_cuda().cuFuncSetAttribute(self._function, _LARGE_CLUSTERS, 1))
            self._attribute.id, self._attribute.on = _CLUSTER, cluster
            self._attribute.rest[0] = self._attribute.rest[1] = 1
            self._config.count = 1

    def fit(self) -> int:
        """Clusters that the card has room for at a time."""
        count = ctypes.c_int()
        _check(_cuda().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(self._config)))
        return count.value


def source() -> str:
    """What is compiled."""
    return (files("evener_backend_cuda") / "hopper.cuh").read_text() + (Path(__file__).with_suffix(".cu").read_text())


def compiled() -> bytes:
    """Machine code of all kernels."""
    return Driver().compile(source(), {"SHARED_BYTES": SHARED, "PROGRAMS": PROGRAMS})


def spread(values: torch.Tensor) -> list[int]:
    """Least, median and most."""
    ordered = values.flatten().sort().values
    return [int(ordered[at]) for at in (0, len(ordered) // 2, -1)]


def exchanged(stamps: torch.Tensor, leaders: torch.Tensor, nbytes: int) -> dict[str, Any]:
    """Fields of a row: of stamps [program, round, 4], which programs lead, and the bytes that are read in a round."""
    stamps = stamps[:, WARM:]
    began, had, told_ns, had_ns = stamps[~leaders].unbind(-1)
    us = float((had_ns[:, -1] - had_ns[:, 0]).double().mean()) / (had_ns.shape[1] - 1) / 1e3
    last = told_ns.max(0).values
    waited = had - began
    row: dict[str, Any] = {
        "us": round(us, 2), "tb_s": round(nbytes / us / 1e6, 2), "cycles": spread(waited),
        "last_cycles": spread(waited.min(0).values)[1], "after_last_ns": spread(had_ns - last),
    }  # fmt: skip
    gathered = stamps[leaders][..., 2]
    if gathered.numel() and int(gathered.max()):
        row["gathered_ns"] = spread(gathered - last)
    return row


def probed(stamps: torch.Tensor, leaders: torch.Tensor, way: Way) -> dict[str, Any]:
    """The same of single accesses, cycles: of those that stream, and of leaders."""
    kinds = _PROBED if way.cluster > 1 else _PROBED[:2]
    whose = {"workers": ~leaders, **({"leaders": leaders} if way.leads else {})}
    return {who: {kind: spread(stamps[chosen][..., n]) for n, kind in enumerate(kinds)}
            for who, chosen in whose.items()}  # fmt: skip


class Bench:
    """The memory that kernels use, and what is the same in all rows."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.where = out, torch.device("cuda", 0)
        self.weights = torch.empty(WEIGHTS // 8, dtype=torch.int64, device=self.where).random_()
        self.code = compiled()
        self.report = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.facts = {"device": torch.cuda.get_device_name(), "date": date.today().isoformat()}
        self.fits = {1: PROGRAMS, **{size: ClusterKernel(self.code, "leader_scatter", size).fit() for size in CLUSTERS}}

    def run(self, text: str) -> None:
        """Write a way's row. Raises RuntimeError if the launch fails; the card then serves this process no more."""
        way = Way.of(text)
        clusters = min(self.fits[way.cluster], PROGRAMS // way.cluster)
        common = {"benchmark": "exchange_latency", "way": text}
        if not clusters:
            record({**common, "refused": f"no cluster of {way.cluster} fits", **self.facts}, self.out)
            return
        programs, workers = clusters * way.cluster, way.workers(clusters)
        tiles = round(TILES / workers)
        stamps = torch.zeros(programs, ROUNDS, 4, dtype=torch.int64, device=self.where)
        messages = torch.zeros(2 * COPIES * MESSAGES * 2 + PROGRAMS * 32, dtype=torch.int64, device=self.where)
        vector = torch.zeros(2, MESSAGES * 3, dtype=torch.int32, device=self.where)
        counts = torch.zeros(2, 64, dtype=torch.int32, device=self.where)  # a line each: the counter, and wrong words
        sink = torch.zeros(programs, dtype=torch.int32, device=self.where)
        ahead = tiles if way.ahead is None else min(way.ahead, tiles)
        asked = Asked(
            *(tensor.data_ptr() for tensor in
              (self.weights, messages, vector, counts[0], stamps, self.report, counts[1], sink)),
            tiles, ROUNDS, way.flight, ahead, min(2, ahead), WEIGHTS // 32768 // workers, way.leads,
        )  # fmt: skip
        kernel = ClusterKernel(self.code, KERNELS[way.kernel], way.cluster, clusters)
        torch.cuda.synchronize()
        kernel(torch.cuda.current_stream().cuda_stream, asked)
        torch.cuda.synchronize()
        leaders = torch.arange(programs) % way.cluster == 0 if way.leads else torch.zeros(programs, dtype=torch.bool)
        found = stamps.cpu()
        if way.kernel == "probe":
            row: dict[str, Any] = probed(found, leaders, way)
        else:
            row = {**exchanged(found, leaders, tiles * workers * TILE), "wrong": int(counts[1, 0])}
        record({**common, "programs": programs, "workers": workers, **row, **self.facts}, self.out)


def run_here(ways: Sequence[str], out: Path | None, first: bool) -> int:
    """Rows in this process: 0, or of the way that failed 2 + its number."""
    bench = Bench(out)
    if first:
        fits = {str(size): bench.fits[size] for size in CLUSTERS}
        record({"benchmark": "exchange_latency", "clusters_that_fit": fits, "shared_bytes": SHARED, **bench.facts}, out)
    for n, text in enumerate(ways):
        try:
            bench.run(text)
        except RuntimeError as error:
            code = int(bench.report[0])
            print(f"FAILED {text}: wait {code & 0xFFFF} of program {code >> 16}: {str(error)[:200]}", flush=True)
            return 2 + n
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY")
    made.add_argument("--limit", type=float, default=60.0, help="seconds for all ways")
    made.add_argument("--compile", action="store_true", help="only compile")
    made.add_argument("--here", choices=("first", "later"), help=argparse.SUPPRESS)
    made.add_argument("--out", type=Path)
    return made


def main(argv: Sequence[str]) -> int:
    """A process for all ways, and another one after a failure. 0 if none failed."""
    asked = parser().parse_args(argv)
    for text in asked.ways:
        Way.of(text)
    if asked.compile:
        print(f"{len(compiled())} bytes of machine code")
        return 0
    if asked.here:
        return run_here(asked.ways, asked.out, asked.here == "first")
    until, ways, failed, which = time.monotonic() + asked.limit, list(asked.ways), False, "first"
    while ways:
        command = [sys.executable, __file__, *ways, "--here", which, *(["--out", str(asked.out)] if asked.out else [])]
        try:
            code = subprocess.run(command, timeout=max(1.0, until - time.monotonic()), check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"FAILED: more than {asked.limit} s for all ways", flush=True)
            return 1
        failed, which = failed or code != 0, "later"
        ways = ways[code - 1 :] if code > 1 else []
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
