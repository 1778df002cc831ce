"""Time the experts of one layer on the host's processors, as a model larger than its device computes them.

    python benchmarks/host_experts.py [--forms q4_k,q6_k,bf16] [--tokens 1,16] [--threads 16,15] [--pause 0,100]

Experts have the sizes of Qwen3-30B-A3B (2,048 columns, 768 inner, 8 of 128 a token) and random bits. Each call takes
others than those before, until all ``--layers`` were read, so that no cache holds them. ``--pause``: microseconds
between two calls, in which the device computes the rest of a layer. A row has the median microseconds of a call, the
bytes of its experts a second, and that as a share of the speed at which as many threads read memory.
``form:down`` names another form of the second product: ``q4_k:q6_k`` is that of half of the layers of Q4_K_M.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch
from hybrid import read_gb_s
from packed_products import FORMS, part_of

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import ExpertsStatic, select
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.layers.experts import MoEConfig
from evener.layers.norms import norm_common
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeRoutedExperts

HIDDEN, MODEL, CPU = 2048, MoEConfig(experts=128, top=8, inner=768), torch.device("cpu")
#: Bytes with which the speed of memory is measured.
APART = 2 << 30


def main(argv: Sequence[str]) -> int:
    """Print a row for each combination; 0."""
    args = parser().parse_args(argv)
    if unknown := {each for form in args.forms.split(",") for each in form.split(":")} - {*FORMS, "bf16"}:
        raise SystemExit(f"unknown forms: {', '.join(sorted(unknown))}; known are bf16, {', '.join(FORMS)}")
    device, draw = CpuDevice(0, {}), random.Random(1)
    threads = numbers(args.threads) or [device.threads]
    read = {}
    for count in threads:
        device.limit_threads(count)
        read[count] = read_gb_s(APART)
    for form in args.forms.split(","):
        layers = Layers(device, form, args.layers)
        for tokens in numbers(args.tokens):
            for count in threads:
                for pause in numbers(args.pause):
                    device.limit_threads(count)
                    us, nbytes = layers.timed(tokens, args.calls, pause, draw)
                    speed = nbytes / us / 1e3
                    row = {
                        "form": form, "tokens": tokens, "threads": count, "pause_us": pause, "us": round(us, 1),
                        "gb_s": round(speed, 1), "read_gb_s": round(read[count], 1),
                        "share": round(speed / read[count], 3),
                    }  # fmt: skip
                    print(json.dumps(row), flush=True)
                    with (args.out / "host_experts.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--forms", default="q4_k,q4_k:q6_k,bf16", help="with commas between them")
    made.add_argument("--layers", type=int, default=4, help="layers whose experts are in memory")
    made.add_argument("--tokens", default="1,16", help="of a call")
    made.add_argument("--threads", default="", help="default: all")
    made.add_argument("--pause", default="0,100", help="microseconds between two calls")
    made.add_argument("--calls", type=int, default=128, help="that are timed")
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    return made


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


class Layers:
    """Experts of several layers, and the op that computes them.

    Args:
        form: of the first product, and after a colon of the second.
    """

    def __init__(self, device: CpuDevice, form: str, count: int) -> None:
        build = Builder("bfloat16", 64)
        group, static = MODEL.declare(build, "layer", norm_common(build, HIDDEN, 1e-5, 0.0, "rms"))
        first, _, second = form.partition(":")
        self._forms = {"gate_up": first, "down": second or first}
        self._device = device
        self._weights = [self._layer(group.fields) for _ in range(count)]
        self._bytes = sum(getattr(self._weights[0], name).nbytes for name in self._forms) // MODEL.experts
        layouts = {name: getattr(self._weights[0], name).layout for name in self._forms}
        own = {**select(static, ExpertsStatic), "placement": None}
        call = OpCall("routed_experts", own, Bucket(1, 64), device.capabilities, layouts)
        kernel = NativeRoutedExperts(device)
        if reason := kernel.supports(call):
            raise SystemExit(f"the kernel does not compute {form}: {reason}")
        self.run: OpFunction = kernel.build(call)
        self._left: list[tuple[int, list[int]]] = []

    def timed(self, tokens: int, calls: int, pause: int, draw: random.Random) -> tuple[float, int]:
        """Median microseconds of a call, and the bytes that it reads. All tokens choose the same experts."""
        x = torch.randn(tokens, HIDDEN).bfloat16()
        weights = torch.full((tokens, MODEL.top), 1 / MODEL.top)
        times = []
        for number in range(calls + 8):
            layer, experts = self._next(draw)
            ids = torch.tensor([experts] * tokens, dtype=torch.int32)
            wait_us(pause)
            began = time.perf_counter_ns()
            self.run(x, ids, weights, self._weights[layer])
            if number >= 8:
                times.append(time.perf_counter_ns() - began)
        return statistics.median(times) / 1e3, self._bytes * MODEL.top

    def _next(self, draw: random.Random) -> tuple[int, list[int]]:
        """A layer and experts of it, all others before the same again."""
        if not self._left:
            for layer in range(len(self._weights)):
                order = draw.sample(range(MODEL.experts), MODEL.experts)
                self._left += [(layer, order[at : at + MODEL.top]) for at in range(0, MODEL.experts, MODEL.top)]
        return self._left.pop()

    def _layer(self, fields: Any) -> MoEWeights:
        made: dict[str, Any] = dict.fromkeys(MoEWeights._fields)
        for name, form in self._forms.items():
            made[name] = self._stack(fields[name], form)
        for name in ("slots", "copies"):
            made[name] = fields[name].make(CPU)
        return MoEWeights(**made)

    def _stack(self, weight: LinearWeight, form: str) -> PackedWeight:
        """Few matrices are drawn, and packed often: drawing takes long."""
        if form == "bf16":
            return self._plain(weight)
        drawn = [[replace(part_of(form, p.rows, p.columns, seed, CPU), name=p.name) for p in weight.parts]
                 for seed in range(4)]  # fmt: skip
        count = max(1, weight.experts)
        matrices = [drawn[number % 4] for number in range(count)]
        return self._device.blocks.pack_stack(matrices, count, "bfloat16", CPU)

    def _plain(self, weight: LinearWeight) -> PackedWeight:
        rows, columns = sum(p.rows for p in weight.parts), weight.parts[0].columns
        parts = [[replace(p, tensors={"weight": torch.randn(p.rows, columns).bfloat16() * columns**-0.5})
                  for p in weight.parts]] * weight.experts  # fmt: skip
        packed: PackedWeight = self._device.plain.pack_stack(parts, weight.experts, "bfloat16", CPU)
        assert packed.shape == (weight.experts, rows, columns)
        return packed


def wait_us(count: int) -> None:
    """Wait without giving up the core, as a thread does that waits for a device."""
    end = time.perf_counter_ns() + 1000 * count
    while time.perf_counter_ns() < end:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
