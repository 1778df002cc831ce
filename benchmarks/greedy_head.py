"""Time the search of the largest logit of one token on a Hopper GPU, beside all logits, and compare the ids.

    python benchmarks/greedy_head.py [COLUMNSxROWS ...] [--programs 256x3] [--inputs 300] [--out FILE.jsonl]

``programs``: threads of one, and how many a multiprocessor has. A row has microseconds in a captured graph: ``search``
with the norm, ``all_logits`` with norm, product and choice in several launches, ``reading`` the time in which the card
reads the codes at its speed. ``wrong``: how many of ``inputs`` ids are not those of a product in float32; their
logits are printed. ``candidates``: median and most ids whose logits were computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch

import evener_backend_cuda.screened_head as module
from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight, WeightPart, plain
from evener_backend_cuda.plugin import evener_device
from evener_backend_cuda.screened import GROUP, SCREENED, ScreenedMatrix, decoded, distance
from evener_kernels_triton.composites import TritonHead
from evener_kernels_triton.sampling import TritonGreedy
from evener_kernels_triton.tuning import Tuning

SIZES = ("1024x151936", "2048x151936", "2560x151936", "4096x151936", "2048x102400")
EPS = 1e-6
#: Inputs whose candidates are counted: it takes the codes as float32.
COUNTED = 24


def microseconds(run: Callable[[], object], count: int = 20) -> float:
    """Of one run, the least of ten replays of a graph with ``count``."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            run()
    times = list[float]()
    for _ in range(10):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / count)
    return min(times)


def read_speed() -> float:
    """TB/s of a sum over 4 GiB."""
    numbers = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    return float(numbers.nbytes / microseconds(numbers.sum, 3) / 1e6)


def candidates(y: torch.Tensor, logits: torch.Tensor, matrix: ScreenedMatrix) -> int:
    """How many rows have a bound that reaches the logit of the row that seems the best, of ``y`` [1, columns]."""
    apart, _ = distance(y.shape[1], module.CHANCE)
    approximate = (y @ decoded(matrix).T)[0]
    squares = torch.nn.functional.pad(y, (0, -y.shape[1] % GROUP)).view(-1, GROUP).square().sum(1)
    bounds = approximate + apart * (matrix.scales.float().square() @ squares).sqrt()
    return int((bounds >= logits[approximate.argmax()]).sum())


def measure(columns: int, rows: int, inputs: int, speed: float) -> dict[str, Any]:
    """One row."""
    device = evener_device(0, {})
    part = WeightPart("head", rows, columns, plain("bfloat16"))
    declared = LinearWeight("head", (part,), rows, columns, "bfloat16", out="float32")
    declared.layout = SCREENED.layout
    static = {
        "hidden": columns, "dtype": "bfloat16", "eps": EPS, "offset": 0.0, "norm": "rms", "vocab": rows,
        "weight": declared, "logit_scale": 1.0, "cap": None, "communicator": None,
    }  # fmt: skip
    can, layouts = device.capabilities, {"weight": SCREENED.layout}
    call = OpCall("vocab_greedy", static, Bucket(1, 1), can, layouts)
    kernel = module.ScreenedGreedy(device)
    if reason := kernel.supports(call):
        raise SystemExit(f"the kernel {reason}")
    values = (torch.randn(rows, columns, device="cuda") * 0.02).bfloat16()
    packed = SCREENED.pack([replace(part, tensors={"weight": values})], "bfloat16", torch.device("cuda"))
    search, gain = kernel.build(call), torch.rand(columns, device="cuda") + 0.5
    wrong, counted = 0, []
    for number in range(inputs):
        x = torch.randn(1, columns, device="cuda")
        x[0, ::97] *= 1 + number % 5 * 4
        found = int(search(x, gain, packed, None))
        y = (x * torch.rsqrt(x.square().mean() + EPS) * gain).bfloat16().float()
        logits = (y @ values.float().T)[0]
        if found != int(logits.argmax()):
            wrong += 1
            print(f"{columns} x {rows}: id {found} of {float(logits[found])!r}, not {logits.topk(2)}")
        if number < COUNTED:
            counted.append(candidates(y, logits, packed.data))
    tuning = Tuning.of(can)
    bare = replace(declared, layout="plain")
    all_logits = TritonHead(device, tuning).build(
        OpCall("head", {**static, "weight": bare}, Bucket(1, 1), can, {"weight": "plain"})
    )
    choose = TritonGreedy(device, tuning).build(OpCall("greedy", {"vocab": rows}, Bucket(1, 1), can))
    as_plain = PackedWeight("plain", (rows, columns), values, values.nbytes)
    x = torch.randn(1, columns, device="cuda")
    codes = packed.nbytes - values.nbytes
    return {
        "model": f"a head of {columns:,} x {rows:,}", "columns": columns, "rows": rows,
        "search": round(microseconds(lambda: search(x, gain, packed, None)), 1),
        "all_logits": round(microseconds(lambda: choose(all_logits(x, gain, as_plain, None))), 1),
        "reading": round(codes / speed / 1e6, 1), "wrong": wrong, "inputs": inputs,
        "candidates": [sorted(counted)[len(counted) // 2], max(counted)],
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--programs", default="256x3")
    parser.add_argument("--inputs", type=int, default=300)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    module.THREADS, module.RESIDENT = map(int, asked.programs.split("x"))
    torch.manual_seed(0)
    speed = read_speed()
    today = datetime.now(timezone.utc).date()
    common = {
        "benchmark": "greedy_head", "device": torch.cuda.get_device_name(), "date": str(today),
        "unit": "µs", "read_tb_s": round(speed, 2), "programs": asked.programs,
        "software": f"CUDA {torch.version.cuda}, torch {torch.__version__.partition('+')[0]}",
        "command": f"python benchmarks/greedy_head.py {' '.join(asked.sizes)} --programs {asked.programs}",
    }  # fmt: skip
    for size in asked.sizes:
        columns, rows = map(int, size.split("x"))
        row = {**common, **measure(columns, rows, asked.inputs, speed)}
        print(json.dumps(row, ensure_ascii=False), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
