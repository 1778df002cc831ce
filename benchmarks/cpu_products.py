"""Time products of linear layers on the CPU by processor time, one thread, in packed formats and plain.

    python benchmarks/cpu_products.py [--forms nvfp4,nf4,plain] [--size 4096] [--rows 1,64] [--dtype bfloat16]
                                      [--isa auto] [--calls 24] [--out FILE]

Four weights [size, size] of random bits take turns, so that no second cache holds the next one. A row has the least and
the median milliseconds of a product, and the billions of operations a second (GFLOP/s) of the least: another program on
the same core doubles a time, and the least of many calls is the one that was alone.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import after_stdlib  # noqa: F401
import torch
from machine import cpu_name, record
from packed_products import FORMS, part_of

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import NVFP4, PackedWeight, QuantFormat, WeightPart, plain
from evener.ops.reference.linear import PLAIN
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.primitives import NativeLinear

CPU = torch.device("cpu")
TABLES = {"nf4": QuantFormat("nf4", 64, scale="float32"), "fp4": QuantFormat("fp4", 64, scale="float32")}
KNOWN = ("plain", "nvfp4", *TABLES, *FORMS)


def main(argv: Sequence[str]) -> int:
    """Print a row for each form and number of rows; 0."""
    args = parser().parse_args(argv)
    forms = args.forms.split(",")
    if unknown := {*forms} - {*KNOWN}:
        raise SystemExit(f"unknown forms: {', '.join(sorted(unknown))}; known are {', '.join(KNOWN)}")
    device = CpuDevice(0, {"isa": args.isa})
    device.limit_threads(1)
    for form in forms:
        weights = [packed(device, form, args.size, args.dtype, seed) for seed in range(4)]
        for rows in (int(each) for each in args.rows.split(",")):
            least, median = milliseconds(device, weights, rows, args.dtype, args.calls)
            row = {
                "device": cpu_name(), "date": str(date.today()), "model": f"one product of {args.size} x {args.size}",
                "command": f"python benchmarks/cpu_products.py {shlex.join(argv)}".strip(),
                "form": form, "size": args.size, "rows": rows, "dtype": args.dtype, "isa": args.isa,
                "ms": round(least, 5), "median_ms": round(median, 5),
                "gflops": round(2 * rows * args.size**2 / least / 1e6, 1),
            }  # fmt: skip
            record(row, args.out)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--forms", default="nvfp4,nf4,plain", help="with commas between them")
    made.add_argument("--size", type=int, default=4096, help="rows and columns of a weight")
    made.add_argument("--rows", default="1,4,16,64,512", help="of x")
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    made.add_argument("--isa", default="auto", help="as cpu.isa")
    made.add_argument("--calls", type=int, default=24, help="that are timed")
    made.add_argument("--out", type=Path)
    return made


def packed(device: CpuDevice, form: str, size: int, dtype: str, seed: int) -> PackedWeight:
    """A weight of random bits."""
    draw = torch.Generator().manual_seed(seed)
    if form == "plain":
        values = torch.randn(size, size, generator=draw).to(getattr(torch, dtype))
        return PLAIN.pack([WeightPart(form, size, size, plain(dtype), {"weight": values})], dtype, CPU)
    if form in FORMS:
        return device.blocks.pack([part_of(form, size, size, seed, CPU)], dtype, CPU)
    how = TABLES.get(form, NVFP4)
    tensors = {"weight": torch.randint(256, (size, size // 2), generator=draw, dtype=torch.uint8)}
    scale = torch.rand(size, size // how.group, generator=draw) + 0.5
    tensors["scale"] = scale.to(getattr(torch, str(how.scale)))
    tensors["factor" if how == NVFP4 else "table"] = torch.rand(() if how == NVFP4 else 16, generator=draw) / 64
    return device.blocks.pack([WeightPart(form, size, size, how, tensors)], dtype, CPU)


def milliseconds(
    device: CpuDevice, weights: Sequence[PackedWeight], rows: int, dtype: str, calls: int
) -> tuple[float, float]:
    """The least and the median processor time of a product."""
    size = weights[0].shape[0]
    static = {"rows": size, "columns": size, "dtype": dtype, "out": dtype}
    call = OpCall("linear", static, Bucket(1, 512), device.capabilities, {"weight": weights[0].layout})
    kernel = NativeLinear(device)
    if reason := kernel.supports(call):
        raise SystemExit(f"the kernel does not compute {weights[0].layout}: {reason}")
    run, x, times = kernel.build(call), torch.randn(rows, size).to(getattr(torch, dtype)), []
    for number in range(calls + 2):
        began = time.thread_time()
        run(x, weights[number % len(weights)], None)
        if number >= 2:
            times.append((time.thread_time() - began) * 1e3)
    return min(times), statistics.median(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
