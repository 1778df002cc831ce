"""Time latent attention of one token in one launch, beside the same in several launches, on a GPU.

    python benchmarks/one_token_latent.py [--layers 12] [--tokens 1 130 ...] [--flights 0 4 ...] [--stamps] [--compile]
    [--out FILE.jsonl]

Layers of DeepSeek-V2-Lite with random weights are chained in a captured graph, and are larger together than the card's
cache. Rows for each number of earlier tokens: microseconds a layer, how far the stream after all layers is from that of
several launches, of its largest number, and whether it has the same bits in 20 replays. ``--flights``: tiles that a
program asks for at once; 0: all of its ring. ``--stamps``: median and most cycles of the phases of a program.
``--compile``: only compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import record
from model_configs import CONFIGS
from one_launch_layer import Impatient
from one_token_experts import seconds
from packed_products import read_speed

from evener.contracts.declared import LinearWeight, Table
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpCall, OpFunction
from evener.contracts.state import StateStep
from evener.engine.quantized.state import bind_slot
from evener.layers.builder import Builder
from evener.layers.decoder import MixerLayer, MLPConfig
from evener.layers.latent import LatentConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.one_token_latent import LatentSite, OneTokenLatent
from evener_backend_cuda.plugin import evener_device
from evener_kernels_triton.latent import TritonLatentAttentionBlock
from evener_kernels_triton.latent_state import LATENT_LAYOUT, LatentState
from evener_kernels_triton.tuning import Tuning

PAGE, OP = 64, "latent_attention_block"
PHASES = (
    "begin, norm", "rows of state", "rows of the query", "into latent space", "exchange", "attention", "exchange",
    "merge, values", "exchange", "output",
)  # fmt: skip
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Stack:
    """Layers of random weights, and state of up to so many tokens."""

    def __init__(self, device: Device, config: Mapping[str, Any], layers: int, tokens: int) -> None:
        self.device, self.config, self.where = device, config, device.torch_device
        self.tuning = Tuning.of(device.capabilities)
        c, self.build = config, Builder("bfloat16", tokens + 1)
        rope = c["qk_rope_head_dim"]
        attention = LatentConfig(
            heads=c["num_attention_heads"], nope_dim=c["qk_nope_head_dim"], rope_dim=rope, value_dim=c["v_head_dim"],
            rank=c["kv_lora_rank"], q_rank=None, rotary=RotaryConfig(rope, interleaved=True),
        )  # fmt: skip
        self.made = [
            MixerLayer(self.build, f"model.layers.{n}", c["hidden_size"], attention, MLPConfig(inner=64), 1e-6)
            for n in range(layers)
        ]
        self.sites = [site for site in self.build.sites if site.op == OP]
        self._fill(tokens)

    def _fill(self, tokens: int) -> None:
        self.nbytes, draw = 0, torch.Generator(self.where).manual_seed(0)
        by_name: dict[str, torch.Tensor] = {}
        for weight in self.build.weights:
            if isinstance(weight, Table):
                weight.value = weight.make(self.where)
            elif isinstance(weight, LinearWeight):
                parts = []
                for part in weight.parts:
                    noise = torch.randn(part.rows, part.columns, generator=draw, device=self.where)
                    by_name[part.name] = (noise * part.columns**-0.5).to(torch.bfloat16)
                    parts.append(replace(part, tensors={"weight": by_name[part.name]}))
                weight.layout = PLAIN.layout
                weight.value = PLAIN.pack(parts, "bfloat16", self.where)
                self.nbytes += weight.value.nbytes if ".mlp." not in weight.name else 0
            elif weight.sources[0] in by_name:
                weight.value = by_name[weight.sources[0]]
            else:
                noise = torch.randn(weight.shape, generator=draw, device=self.where)
                weight.value = (1 + 0.1 * noise).to(torch.bfloat16)
        for group in self.build.groups:
            group.bind()
        self.pages = -(-(tokens + 1) // PAGE)
        for slot in self.build.slots:
            slot.provider = provider = LatentState(self.tuning)
            size = -(-provider.bytes_per_block(slot.spec, PAGE) // 512) * 512
            noise = torch.randn(self.pages, size // 2, generator=draw, device=self.where)
            slot.views = bind_slot(slot, provider, noise.to(torch.bfloat16).view(torch.uint8), 1, PAGE, self.device)
        hidden = self.config["hidden_size"]
        self.x = torch.randn(1, hidden, generator=draw, device=self.where).to(torch.bfloat16)
        self.residual = torch.randn(1, hidden, generator=draw, device=self.where)

    def behind(self, tokens: int) -> None:
        """The next step is behind so many tokens."""
        length = tokens + 1

        def put(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.where)

        table = torch.arange(self.pages, dtype=torch.int32, device=self.where).flip(0)[None]
        at = int(table[0, tokens // PAGE]) * PAGE + tokens % PAGE
        state = StateStep(
            tokens=1, requests=1, max_query=1, max_kv=length, query_start=put(0, 1), kv_lens=put(length),
            positions=put(tokens), slot_mapping=put(at), block_table=table, host_query_lens=[1],
            host_kv_lens=[length],
        )  # fmt: skip
        slot = self.build.slots[0]
        assert slot.provider is not None, "it was set above"
        self.positions, self.meta = state.positions, slot.provider.metadata(state, slot.spec, slot.attention, PAGE)

    def calls(self) -> list[OpCall]:
        can = self.device.capabilities
        return [OpCall(OP, site.static, Bucket(1, 1), can, state_layout=LATENT_LAYOUT) for site in self.sites]

    def steps(self, blocks: list[OpFunction]) -> list[Step]:
        """Each layer's block, as a function of x and the stream."""

        def step(block: OpFunction, layer: Any) -> Step:
            mixer = layer.mixer
            return lambda x, residual: block(
                x, residual, self.positions, mixer.weights.values, mixer.slot.views, self.meta
            )

        return [step(*pair) for pair in zip(blocks, self.made, strict=True)]


class OneLaunch(OneTokenLatent):
    """``sites``: what the calls of its layers are launched with."""

    def __init__(self, stack: Stack, flight: int, stamps: bool) -> None:
        driver = Impatient()
        driver.stamps = stamps
        super().__init__(stack.device, stack.tuning, driver)
        self._asked, self.sites = flight, list[LatentSite]()

    def _flight(self, stages: int) -> int:
        return min(self._asked or stages, stages)

    def site(self, call: OpCall) -> LatentSite:
        self.sites.append(super().site(call))
        return self.sites[-1]


def timed(steps: list[Step], stack: Stack) -> tuple[float, torch.Tensor, bool]:
    """(microseconds a layer, the stream after all layers, whether its bits are the same in each of 20 replays)."""
    x, residual, results = stack.x.clone(), stack.residual.clone(), torch.empty_like(stack.residual)

    def work() -> None:
        x.copy_(stack.x), residual.copy_(stack.residual)
        y, stream = x, residual
        for step in steps:
            y, stream = step(y, stream)
        torch.add(y.float(), stream, out=results)

    work()
    torch.cuda.synchronize()
    took = seconds(work) * 1e6 / len(steps)
    want, same = results.clone(), True
    for _ in range(20):
        work()
        same = same and torch.equal(results, want)
    return took, want, same


def phases(one: OneLaunch, steps: list[Step], stack: Stack) -> dict[str, list[int]]:
    """Median and most cycles of a program for each phase of a layer in the middle."""
    stamps = torch.zeros(128, 16, dtype=torch.int64, device=stack.where)
    one.sites[len(steps) // 2].stamps = stamps.data_ptr()
    timed(steps, stack)
    one.sites[len(steps) // 2].stamps = None
    took = stamps[:, 1 : len(PHASES) + 1] - stamps[:, : len(PHASES)]
    pairs = zip(PHASES, took.T.double(), strict=True)
    return {f"{n} {name}": [int(each.quantile(q)) for q in (0.5, 1)] for n, (name, each) in enumerate(pairs)}


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 17, 130, 300, 1000, 4000])
    parser.add_argument("--flights", type=int, nargs="*", default=[0])
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model, device = "deepseek-v2-lite", evener_device(0, {})
    speed = 0.0 if asked.compile else read_speed()
    stack = Stack(device, CONFIGS[model], 1 if asked.compile else asked.layers, max(asked.tokens))
    ways = {flight: OneLaunch(stack, flight, asked.stamps) for flight in asked.flights}
    calls, report = stack.calls(), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    if reason := ways[asked.flights[0]].supports(calls[0]):
        sys.exit(reason)
    several = stack.steps([TritonLatentAttentionBlock(device, stack.tuning).build(call) for call in calls])
    ones = {flight: stack.steps([one.build(call) for call in calls]) for flight, one in ways.items()}
    if asked.compile:
        return
    for one in ways.values():
        for site in one.sites:
            site._argument.report = report.data_ptr()
    for tokens in asked.tokens:
        stack.behind(tokens)
        us, want, same = timed(several, stack)
        facts = {"benchmark": "one_token_latent", "model": model, "tokens": tokens}
        more = {"floor_us": round((stack.nbytes / asked.layers + 1152 * tokens) / speed / 1e6, 2),
                "read_tb_s": round(speed, 2), "device": torch.cuda.get_device_name(), "date": date.today().isoformat(),
                "command": "python benchmarks/one_token_latent.py"}  # fmt: skip
        record({**facts, "way": "several", "us": round(us, 2), "same": same, **more}, asked.out)
        for flight, one in ways.items():
            try:
                us, got, same = timed(ones[flight], stack)
            except RuntimeError as error:  # of the card, which is of no use to this process any more
                code = int(report[0])
                sys.exit(f"FAILED: wait {code & 0xFFFF} of program {code >> 16}: {str(error)[:200]}")
            differs = float((got - want).abs().max() / want.abs().max())
            row = {**facts, "way": f"one, {flight or 'all'}", "us": round(us, 2), "same": same,
                   "differs": round(differs, 5), **more}  # fmt: skip
            if asked.stamps:
                row["cycles"] = phases(one, ones[flight], stack)
            record(row, asked.out)


if __name__ == "__main__":
    main()
