"""Time decoder layers of one token in one launch each or together, beside the same in several launches, on a GPU.

    python benchmarks/one_launch_layer.py [CASE ...] [--tokens 200] [--compile] [--stamps] [--out FILE.jsonl]

CASE is MODEL:FORM, one of ``CASES``; of qwen3-30b-a3b it is attention alone. Layers of random weights are chained in a
captured graph, and are larger together than the card's cache. A row for each way: microseconds a layer, and how far
the stream after all layers is from that of several launches. Ways are RESIDENT/FLIGHT/LAYERS: programs in a
multiprocessor, tiles that each asks for at once, and layers that share a launch. Each case runs in a process of its
own; one that hangs ends with the number of the wait, and the next ways are timed in another process. ``--stamps``:
cycles of each phase of a program. ``--compile``: only compile, in several processes at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch
from machine import record
from model_configs import CONFIGS
from one_token_experts import seconds
from packed_products import INT4, part_of, read_speed
from stored_products import FORMS

from evener.contracts.declared import LinearWeight, Table
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, QuantFormat, WeightPart
from evener.contracts.state import StateStep
from evener.engine.quantized.state import bind_slot
from evener.layers.builder import Builder
from evener.layers.decoder import AttentionConfig, DecoderLayer, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.one_token import OneTokenAttention, OneTokenLayers, Sizes, Way, _OneLaunch
from evener_backend_cuda.one_token_launch import CallSite
from evener_backend_cuda.plugin import evener_device
from evener_kernels_triton.composites import TritonAttentionBlock, TritonMlpBlock
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.state import LAYOUT, PagedState
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Tuning

#: For each case the layers, and the ways of one launch: programs of a multiprocessor, tiles that one asks for (99: all
#: of its ring), and layers of a launch.
CASES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "qwen3-0.6b:plain": (28, ("2/1/1", "2/1/96", "1/1/96", "1/2/96", "1/3/96", "1/99/96")),
    "qwen3-8b:fp8-block": (8, ("1/99/1", "1/99/96", "1/6/96", "1/4/96", "1/2/96")),
    "qwen3-8b:fp8": (8, ("1/99/1", "1/99/96", "1/4/96")),
    "qwen3-8b:plain": (8, ("1/99/1", "1/99/96", "1/4/96")),
    "qwen3-8b:int4": (8, ("1/99/1", "1/4/1", "1/99/96", "1/4/96")),
    "qwen3-8b:int4-zeros": (8, ("1/99/1",)),
    "qwen3-0.6b:int4": (28, ("1/99/1", "1/2/1", "1/99/96", "1/2/96")),
    "qwen3-30b-a3b:int4": (28, ("1/99/1", "1/2/1")),
    "qwen3-30b-a3b:fp8-block": (14, ("1/99/1", "1/2/1")),
    "qwen3-30b-a3b:plain": (8, ("1/99/1", "1/2/1")),
}
PAGE = 64
#: Looks of a wait before it is given up: about a second.
PATIENCE = "(1u << 22)"
PHASES = (
    "begin", "norm", "QKV", "exchange", "heads", "attention", "parts", "merge", "exchange", "output", "exchange",
    "norm, gate, up", "exchange", "down",
)  # fmt: skip
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Stack:
    """Layers of random weights, with state of so many tokens. Weights and state are there after ``fill``."""

    def __init__(self, device: Device, config: Mapping[str, Any], form: str, layers: int, tokens: int) -> None:
        self.device, self.config, self.form, self.layers, self.tokens = device, config, form, layers, tokens
        self.tuning, self.where = Tuning.of(self.device.capabilities), self.device.torch_device
        c, build = self.config, Builder("bfloat16", self.tokens + 1)
        self.build = build
        self.alone = "num_experts" in c
        dim = c.get("head_dim", 128)
        attention = AttentionConfig(
            heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"], head_dim=dim, rotary=RotaryConfig(dim),
            qk_norm=True,
        )  # fmt: skip
        mlp = MLPConfig(inner=c["intermediate_size"])
        hidden = c["hidden_size"]
        self.made = [DecoderLayer(build, f"model.layers.{n}", hidden, attention, mlp, 1e-6) for n in range(self.layers)]
        how = QuantFormat("bfloat16") if self.form == "plain" else {**FORMS, **INT4}[self.form]
        for weight in build.weights:
            if isinstance(weight, LinearWeight):
                weight.parts = tuple(replace(part, format=how) for part in weight.parts)
                weight.layout = self.packing.layout

    def fill(self) -> None:
        """Make weights and state."""
        build, hidden = self.build, self.config["hidden_size"]
        self.nbytes, draw = 0, torch.Generator(self.where).manual_seed(0)
        for weight in build.weights:
            if isinstance(weight, Table):
                weight.value = weight.make(self.where)
            elif isinstance(weight, LinearWeight):
                if not self.alone or ".mlp." not in weight.name:
                    weight.value = self._packed(weight, draw)
                    self.nbytes += weight.value.nbytes
            else:
                noise = torch.randn(weight.shape, generator=draw, device=self.where)
                weight.value = (1 + 0.1 * noise).to(torch.bfloat16)
        for group in build.groups:
            group.bind()
        pages = -(-(self.tokens + 1) // PAGE)
        for slot in build.slots:
            slot.provider = provider = PagedState(self.tuning)
            size = -(-provider.bytes_per_block(slot.spec, PAGE) // 512) * 512
            noise = torch.randn(pages, size // 2, generator=draw, device=self.where)
            slot.views = bind_slot(slot, provider, noise.to(torch.bfloat16).view(torch.uint8), 1, PAGE, self.device)
        length = self.tokens + 1

        def put(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.where)

        table = torch.arange(pages, dtype=torch.int32, device=self.where).flip(0)[None]
        at = int(table[0, self.tokens // PAGE]) * PAGE + self.tokens % PAGE
        state = StateStep(
            tokens=1, requests=1, max_query=1, max_kv=length, query_start=put(0, 1), kv_lens=put(length),
            positions=put(self.tokens), slot_mapping=put(at), block_table=table, host_query_lens=[1],
            host_kv_lens=[length],
        )  # fmt: skip
        slot = build.slots[0]
        self.positions = state.positions
        assert slot.provider is not None, "it was set above"
        self.meta = slot.provider.metadata(state, slot.spec, slot.attention, PAGE)
        self.x = torch.randn(1, hidden, generator=draw, device=self.where).to(torch.bfloat16)
        self.residual = torch.randn(1, hidden, generator=draw, device=self.where)

    @property
    def packing(self) -> Packing:
        """How weights are stored on the device."""
        return PLAIN if self.form == "plain" else PACKED if self.form in INT4 else STORED

    def _packed(self, weight: LinearWeight, draw: torch.Generator) -> PackedWeight:
        """Random numbers whose rows have a norm of about 1."""
        parts = list[WeightPart]()
        for part in weight.parts:
            rows, columns, how = part.rows, part.columns, part.format
            noise = torch.randn(rows, columns, generator=draw, device=self.where)
            if self.form == "plain":
                tensors = {"weight": (noise * columns**-0.5).to(torch.bfloat16)}
            elif self.form in INT4:
                tensors = dict(part_of(self.form, rows, columns, hash(part.name) % 997, self.where).tensors)
            else:
                shape = -(-rows // how.group_out), -(-columns // (how.group or columns))
                scale = (torch.rand(shape, generator=draw, device=self.where) + 0.5) * columns**-0.5
                tensors = {"weight": noise.to(torch.float8_e4m3fn), "scale": scale}
            parts.append(replace(part, tensors=tensors))
        return self.packing.pack(parts, "bfloat16", self.where)

    def calls(self, op: str) -> list[OpCall]:
        """A call of each layer: of the whole, or of a block of it."""
        found = []
        for layer in self.made:
            static: Any = layer.sites[0].static
            if op != "decoder_layer":
                static = static["attention" if op == "attention_block" else "mlp"]
            found.append(OpCall(op, static, Bucket(1, 1), self.device.capabilities, state_layout=LAYOUT))
        return found

    def several(self) -> list[Step]:
        """Layers in several launches."""
        attention = TritonAttentionBlock(self.device, self.tuning)
        blocks = [attention.build(call) for call in self.calls("attention_block")]
        if self.alone:
            return [self._attends(*pair) for pair in zip(blocks, self.made, strict=True)]
        mlp = TritonMlpBlock(self.device, self.tuning)
        mlps = [mlp.build(call) for call in self.calls("mlp_block")]

        def step(one: OpFunction, two: OpFunction, layer: DecoderLayer) -> Step:
            first = self._attends(one, layer)
            return lambda x, residual: two(*first(x, residual), layer.mlp.values)

        return [step(*each) for each in zip(blocks, mlps, self.made, strict=True)]

    def _attends(self, block: OpFunction, layer: DecoderLayer) -> Step:
        return lambda x, residual: block(
            x, residual, self.positions, layer.attention.values, layer.slot.views, self.meta
        )

    def one(self, kernel: _OneLaunch) -> list[Step]:
        """Layers in one launch each. Raises ValueError with the reason if the kernel refuses them."""
        calls = self.calls(kernel.op)
        if reason := kernel.supports(calls[0]):
            raise ValueError(reason)

        def step(run: OpFunction, layer: DecoderLayer) -> Step:
            if self.alone:
                return self._attends(run, layer)
            return lambda x, residual: run(
                x, residual, self.positions, layer.attention.values, layer.mlp.values, layer.slot.views, self.meta
            )

        return [step(kernel.build(call), layer) for call, layer in zip(calls, self.made, strict=True)]


class Impatient(Driver):
    """Waits end soon, and kernels may write the clock."""

    stamps = False

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        return super().compile(source, {**defines, "PATIENCE": PATIENCE, **({"STAMPS": 1} if self.stamps else {})})


def kernel_of(stack: Stack, way: str, driver: Driver | None = None) -> tuple[_OneLaunch, list[CallSite]]:
    """The kernel of a way, and what its calls are launched with, once they are built."""
    resident_, flight_, layers_ = map(int, way.split("/"))
    base: Any = OneTokenAttention if stack.alone else OneTokenLayers
    launched: list[CallSite] = []

    class Chosen(base):  # type: ignore[misc]
        resident = resident_

        def _size_refusal(self, sizes: Sizes) -> str | None:
            return None

        def _way(self, sizes: Sizes) -> Way:
            return Way(flight_ % 99, layers_)

        def _launched(self, call: OpCall) -> CallSite:
            launched.append(super()._launched(call))
            return launched[-1]

    return Chosen(stack.device, stack.tuning, driver), launched


def through(steps: list[Step], x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token through all layers."""
    for step in steps:
        x, residual = step(x, residual)
    return x, residual


def timed(steps: list[Step], stack: Stack) -> tuple[float, torch.Tensor]:
    """(microseconds a layer, the stream after all layers)."""
    x, residual = stack.x.clone(), stack.residual.clone()
    through(steps, x.clone(), residual.clone())
    torch.cuda.synchronize()
    results = torch.empty_like(residual)

    def work() -> None:
        x.copy_(stack.x), residual.copy_(stack.residual)
        y, stream = through(steps, x, residual)
        torch.add(y.float(), stream, out=results)

    return seconds(work) * 1e6 / len(steps), results


def phases(launched: list[CallSite], steps: list[Step], stack: Stack) -> dict[str, list[int]]:
    """Least, median and most cycles of a program for each phase of a layer: the last one of a launch with several, else
    that before the last."""
    stamps = torch.zeros(128, 16, dtype=torch.int64, device=stack.where)
    for each in launched[:1] if launched[0]._most > 1 else launched[-2:-1]:
        each.stamps = stamps.data_ptr()
    timed(steps, stack)
    last = 9 if stack.alone else 14
    took = stamps[:, 1 : last + 1] - stamps[:, :last]
    cycles = [[int(each.quantile(share)) for share in (0, 0.5, 1)] for each in took.T.double()]
    return {f"{n} {name}": value for n, (name, value) in enumerate(zip(PHASES, cycles, strict=False))}


def run_case(case: str, ways: list[str], asked: argparse.Namespace) -> None:
    """Rows of one case, in this process."""
    model, _, form = case.partition(":")
    device = evener_device(0, {})
    speed = read_speed()
    stack = Stack(device, CONFIGS[model], form, CASES[case][0], asked.tokens)
    stack.fill()
    part = "attention" if stack.alone else "layer"
    common = {"benchmark": "one_launch_layer", "model": model, "form": form, "part": part, "tokens": asked.tokens}
    us, want = timed(stack.several(), stack)
    floor = round(stack.nbytes / stack.layers / speed / 1e6, 2)
    facts = {"floor_us": floor, "read_tb_s": round(speed, 2), "device": torch.cuda.get_device_name(),
             "date": date.today().isoformat(),
             "command": f"python benchmarks/one_launch_layer.py {case} --tokens {asked.tokens}"}  # fmt: skip
    record({**common, "way": "several", "us": round(us, 2), **facts}, asked.out)
    report = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    for way in ways:
        driver = Impatient()
        driver.stamps = asked.stamps
        kernel, launched = kernel_of(stack, way, driver)
        try:
            steps = stack.one(kernel)
        except ValueError as error:
            print(f"{case} {way}: refused: {error}", flush=True)
            continue
        for layer in launched:
            layer.report = report.data_ptr()
        try:
            us, got = timed(steps, stack)
            differs = float((got - want).norm() / want.norm())
            row = {**common, "way": way, "us": round(us, 2), "differs": round(differs, 5), **facts}
            if asked.stamps:
                row["cycles"] = phases(launched, steps, stack)
            record(row, asked.out)
        except RuntimeError as error:  # of the card, which is of no use to this process any more
            code = int(report[0])
            print(f"FAILED {case} {way}: wait {code & 0xFFFF} of program {code >> 16}: {str(error)[:200]}", flush=True)
            sys.exit(2 + ways.index(way))


def compile_way(job: tuple[str, str, bool]) -> None:
    """Put one way's machine code into the cache."""
    case, way, stamps = job
    model, _, form = case.partition(":")
    driver = Impatient()
    driver.stamps = stamps
    stack = Stack(evener_device(0, {}), CONFIGS[model], form, 1, 1)
    kernel, _ = kernel_of(stack, way, driver)
    call = stack.calls(kernel.op)[0]
    if kernel.supports(call) is None:
        kernel._launched(call)


def main() -> None:
    """A process for each case, and another one after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--ways", default="", help="such as 1/99/96,2/1/1 (default: all of the case)")
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a process")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.here:
        run_case(asked.cases[0], asked.ways.split(","), asked)
        return
    if asked.compile:
        jobs = [(case, way, asked.stamps) for case in asked.cases for way in CASES[case][1]]
        with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_way, jobs))
        return
    for case in asked.cases:
        ways = asked.ways.split(",") if asked.ways else list(CASES[case][1])
        while ways:
            words = ["--tokens", str(asked.tokens), "--ways", ",".join(ways), *(["--stamps"] * asked.stamps)]
            words += ["--out", str(asked.out)] if asked.out else []
            try:
                code = subprocess.run(
                    [sys.executable, __file__, case, "--here", *words], timeout=asked.limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                print(f"FAILED {case}: took more than {asked.limit} s", flush=True)
                code = 1
            ways = ways[code - 1 :] if code > 1 else []


if __name__ == "__main__":
    main()
