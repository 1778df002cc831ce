"""Time the experts of one token on a GPU: the router, gate and up, and down of several layers of Qwen3-30B-A3B in
float8 with scales of 128 x 128, chained in one graph. No layer's weights are in the card's cache when it is read.

    python benchmarks/one_token_experts.py [--layers 12] [--compile PART/PARTS] [--out FILE.jsonl]

Rows have the microseconds of a layer for one choice of sizes: ``up`` [rows at a time, programs for each expert, warps]
for gate and up, ``down`` [rows, columns at a time, warps]. ``--compile``: only compile every PARTS-th choice.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import record
from packed_products import read_speed
from stored_products import tuning as tuning_here

from evener_kernels_triton.jit.experts import single_token_down_kernel, single_token_up_kernel
from evener_kernels_triton.linear import persistent_gemv
from evener_kernels_triton.stored import Form, StoredMatrix, words

HIDDEN, INNER, EXPERTS, TOP = 2048, 768, 128, 8
ROUTING: dict[str, Any] = {
    "CORRECT": False, "SCORING": "softmax", "TOP": TOP, "GROUPS": 1, "EACH": EXPERTS, "TOP_GROUPS": 1, "GROUP_BEST": 1,
    "RENORMALIZE": True, "GP": 1, "EP": EXPERTS,
}  # fmt: skip
UP, DOWN = (4, 33, 4), (8, 256, 16)  # those of bfloat16
UPS: Sequence[tuple[int, int, int]] = ((4, 33, 8), (2, 33, 4), (2, 66, 4), (4, 66, 4), (8, 33, 8), (4, 48, 4))
DOWNS: Sequence[tuple[int, int, int]] = (
    (4, 256, 8), (8, 256, 8), (4, 256, 16), (16, 128, 16), (16, 256, 16), (16, 128, 8),
)  # fmt: skip
Choice = dict[str, tuple[int, int, int]]
#: Sizes of both launches.
CHOICES: Sequence[Choice] = [
    {"up": UP, "down": DOWN},
    *({"up": each, "down": DOWN} for each in UPS),
    *({"up": UP, "down": each} for each in DOWNS),
]


class Layer:
    """Weights of one layer, and what its launches write."""

    def __init__(self, draw: torch.Generator) -> None:
        def stack(rows: int, columns: int) -> StoredMatrix:
            elements = torch.empty(EXPERTS, rows, columns, dtype=torch.uint8, device="cuda").random_(0, 120)
            scales = torch.full((EXPERTS, rows // 128, columns // 128), 0.002, device="cuda")
            return StoredMatrix(elements, scales, Form("e4m3", 128, 128))

        self.up, self.down = stack(2 * INNER, HIDDEN), stack(HIDDEN, INNER)
        self.router = torch.randn(EXPERTS, HIDDEN, device="cuda", generator=draw).to(torch.bfloat16)
        self.gain = torch.rand(HIDDEN, device="cuda", generator=draw).to(torch.bfloat16)
        self.slots = torch.randperm(EXPERTS, device="cuda", generator=draw).int()[:, None].contiguous()
        self.total = torch.empty(1, HIDDEN, device="cuda")
        self.inside = torch.empty(TOP, INNER, dtype=torch.bfloat16, device="cuda")
        self.y = torch.empty(1, HIDDEN, dtype=torch.bfloat16, device="cuda")


def run(layers: Sequence[Layer], x: torch.Tensor, choice: Choice) -> torch.Tensor:
    """One token through all layers."""
    tuning = tuning_here()
    common = {"OVERLAP": tuning.overlap, **ROUTING, **tuning.launch}
    y, residual = x, torch.zeros(1, HIDDEN, device="cuda")
    for each in layers:
        logits = persistent_gemv(
            tuning, y, each.router, torch.float32, residual=residual, total=each.total, gain=each.gain, eps=1e-6,
            offset=0.0,
        )  # fmt: skip
        elements, scales, blocks, form = words(each.up)
        numbers = 1.0, 1e-6, 0.0, 1.0, 0.0
        n, m, warps = choice["up"]
        single_token_up_kernel[(TOP, m)](
            logits, logits, each.slots, each.total, each.gain, elements, scales, y, y, each.inside, 1, INNER, HIDDEN,
            blocks, scales.stride(0), *numbers, BIAS=False, ACT="silu", EXTRA=0, BN=n, BK=HIDDEN, num_warps=warps,
            **form.word_constants(tuning.converts), **common,
        )  # fmt: skip
        elements, scales, blocks, form = words(each.down)
        n, k, warps = choice["down"]
        single_token_down_kernel[(HIDDEN // n,)](
            logits, logits, each.slots, each.inside, elements, scales, y, y, y, y, each.y, 1, HIDDEN, INNER, blocks,
            scales.stride(0), 1.0, BIAS=False, EXTRA=0, ALIGNED=True, ADD=False, GATE=False, TP=TOP, BN=n, BK=k,
            AHEAD=min(3, INNER // k), ROLL=False, num_warps=warps, **form.word_constants(tuning.converts), **common,
        )  # fmt: skip
        y, residual = each.y, each.total
    return y


def seconds(work: Callable[[], object]) -> float:
    """Of one replay of ``work``: the median of five times twenty."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found: list[float] = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(20):
            graph.replay()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) / 20e3)
    return statistics.median(found)


def main() -> None:
    """Print a row for each choice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compile", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, HIDDEN, device="cuda", generator=draw).to(torch.bfloat16)
    layers = [Layer(draw) for _ in range(1 if asked.compile else asked.layers)]
    if asked.compile:
        part, parts = map(int, asked.compile.split("/"))
        for choice in CHOICES[part::parts]:
            run(layers, x, choice)
        torch.cuda.synchronize()
        return
    want = None
    speed = read_speed()
    for choice in (*CHOICES, CHOICES[0]):
        got = run(layers, x, choice).float()
        want = got if want is None else want
        error = float((got - want).abs().max() / want.abs().max())
        taken = seconds(lambda choice=choice: run(layers, x, choice))  # type: ignore[misc]
        row = {
            "benchmark": "one_token_experts", "device": torch.cuda.get_device_name(),
            "model": f"Qwen3-30B-A3B, FP8 blocks, {len(layers)} layers' experts", "date": date.today().isoformat(),
            "read_tb_s": round(speed, 2), **choice, "us": round(1e6 * taken / len(layers), 2),
            "differs": round(error, 5), "command": "python benchmarks/one_token_experts.py",
        }  # fmt: skip
        record(row, asked.out)


if __name__ == "__main__":
    main()
