"""Time the experts of layers in bfloat16 for one request on a GPU, shared ones included, chained in one graph.

    python benchmarks/one_token_shared.py [MODEL ...] [--layers 8] [--stamps] [--compile PART/PARTS] [--out FILE.jsonl]
    [--tiny]

MODEL is one of ``MODELS``. Rows have the microseconds of a layer, and changes of the rule's sizes, as a tuning file has
them; ``shared.apart``: shared experts have launches of their own; ``one.flight``: all is one launch, whose programs ask
for so many tiles at once (0: for as many as fit). No layer's weights are in the card's cache when it is read.
``--stamps``: also the median and the most cycles of the one launch's phases over its programs.

``--compile``: only compile every PARTS-th choice. ``--tiny``: small sizes, which Triton's interpreter can run on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from machine import record
from one_launch_layer import Impatient

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight
from evener.contracts.weights import MoEWeights
from evener_backend_cuda.one_token_experts import ExpertsSite, OneTokenExperts
from evener_kernels_triton.experts import TritonMoeBlock
from evener_kernels_triton.tuning import Tuning

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Kernels ask nothing of it.
DEVICE: Any = SimpleNamespace()
Function = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    hidden: int = 2048
    experts: int = 64
    top: int = 6
    inner: int = 1408
    shared: int = 2816


TINY = Sizes(hidden=64, experts=8, top=2, inner=16, shared=32)
MODELS = {"deepseek-v2-lite": Sizes(), "qwen3-30b-a3b": Sizes(experts=128, top=8, inner=768, shared=0)}


#: Of the one launch.
PHASES = ("begin", "norm, router", "choice, first rows", "gate, up", "activation", "down")

#: Changes of the sizes of one token's experts.
EXPERTS: Sequence[Mapping[str, int]] = (
    {"one.flight": 0}, {"one.flight": 10}, {"one.flight": 8}, {"one.flight": 6}, {"one.flight": 4}, {"one.flight": 3},
    {"shared.apart": 1, "down.n": 16, "down.k": 256}, {"shared.apart": 1, "down.n": 8, "down.k": 256},
    {"shared.apart": 1}, {}, {"down.stages": 3}, {"down.n": 8}, {"down.n": 8, "down.k": 256},
    {"down.n": 8, "down.k": 256, "down.stages": 3}, {"down.n": 8, "down.warps": 8}, {"up.warps": 8}, {"up.n": 2},
    {"down.k": 128, "up.warps": 8},
    {"up.m": 66}, {"up.m": 25}, {"up.n": 2, "up.m": 50}, {"up.warps": 8, "up.m": 17},
    {"up.warps": 8, "up.m": 17, "down.n": 8}, {"up.warps": 8, "down.n": 8},
    {"up.n": 2, "down.n": 8, "down.warps": 8},
)  # fmt: skip


def tuning_here() -> Tuning:
    """Launch sizes of this card."""
    if WHERE.type == "cpu":
        return Tuning(8, 227 << 10, False)
    found: Any = torch.cuda.get_device_properties(0)  # torch's types do not know all fields
    return Tuning(found.multi_processor_count, found.shared_memory_per_block_optin, True)


@dataclass
class Layer:
    """Weights of one layer."""

    z: Sizes
    seed: int
    moe: MoEWeights = field(init=False)

    def __post_init__(self) -> None:
        z, draw = self.z, torch.Generator(WHERE).manual_seed(self.seed)

        def packed(*shape: int) -> PackedWeight:
            data = torch.randn(shape, dtype=torch.bfloat16, device=WHERE, generator=draw) * 0.02
            return PackedWeight("plain", shape, data, data.nbytes)

        slots = torch.randperm(z.experts, device=WHERE, generator=draw).int()[:, None].contiguous()
        self.moe = MoEWeights(
            norm=torch.ones(z.hidden, dtype=torch.bfloat16, device=WHERE), router=packed(z.experts, z.hidden),
            gate_up=packed(z.experts, 2 * z.inner, z.hidden), down=packed(z.experts, z.hidden, z.inner), slots=slots,
            copies=torch.ones_like(slots[:, 0]), shared_gate_up=packed(2 * z.shared, z.hidden) if z.shared else None,
            shared_down=packed(z.hidden, z.shared) if z.shared else None,
        )  # fmt: skip


def declared(weight: PackedWeight) -> Any:
    """As a layer declares the weight."""
    *experts, rows, columns = weight.shape
    return SimpleNamespace(
        rows=rows, columns=columns, layout="plain", experts=experts[0] if experts else 0, parts=(), dtype="bfloat16"
    )


def call_of(op: str, static: Mapping[str, Any], variant: Mapping[str, int] | None = None) -> OpCall:
    features = frozenset({f"shared:{tuning_here().shared}"})
    can = DeviceCapabilities(dtypes=frozenset({"bfloat16"}), features=features)
    return OpCall(op, static, Bucket(1, 1), can, variant=variant or {})


class OneLaunch(OneTokenExperts):
    """The experts in one launch. ``sites``: what the calls of its layers are launched with."""

    def __init__(self, flight: int, stamps: bool) -> None:
        driver = Impatient()
        driver.stamps = stamps
        super().__init__(SimpleNamespace(torch_device=WHERE), tuning_here(), driver)  # type: ignore[arg-type]
        self._asked, self.sites = flight, list[ExpertsSite]()

    def _flight(self, stages: int) -> int:
        return min(self._asked or stages, stages)

    def site(self, call: OpCall) -> ExpertsSite:
        self.sites.append(super().site(call))
        return self.sites[-1]


class Experts:
    """The experts of all layers, with changed sizes."""

    def __init__(self, layers: Sequence[Layer], variant: Mapping[str, int], stamps: bool = False) -> None:
        z, w = layers[0].z, layers[0].moe
        always = [None if weight is None else declared(weight) for weight in (w.shared_gate_up, w.shared_down)]
        static = {
            "hidden": z.hidden, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0, "experts": z.experts, "top": z.top,
            "groups": 1, "top_groups": 1, "group_best": 1, "scale": 1.0, "scoring": "softmax", "renormalize": False,
            "inner": z.inner, "activation": "silu", "alpha": 1.0, "limit": 0.0, "router_weight_on_input": False,
            "post_norm": False, "shared_inner": z.shared, "shared_gate": None, "router": declared(w.router),
            "gate_up": declared(w.gate_up), "down": declared(w.down), "shared_gate_up": always[0],
            "shared_down": always[1],
        }  # fmt: skip
        self.layers = layers
        call = call_of("moe_block", static, variant)
        self.one: OneLaunch | None = None
        if "one.flight" in variant:
            self.one = OneLaunch(variant["one.flight"], stamps)
            self.blocks = [self.one.build(call) for _ in layers]
        else:
            self.blocks = [TritonMoeBlock(DEVICE, tuning_here()).build(call)] * len(layers)

    def __call__(self, index: int, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.blocks[index](x, residual, self.layers[index].moe)
        return found


def chain(block: Experts, layers: int, x: torch.Tensor) -> torch.Tensor:
    """The stream after the experts of some layers."""
    x, residual = x.clone(), torch.zeros(x.shape, device=WHERE)
    for index in range(layers):
        x, residual = block(index, x, residual)
    return x.float() + residual


def seconds(work: Function) -> float:
    """Of one replay of ``work``: the median of five times ten; on a CPU, of one call."""
    if WHERE.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 10e3)
    return statistics.median(found)


def phases(one: OneLaunch, work: Function) -> dict[str, list[int]]:
    """Median and most cycles of a program for each phase of the last layer's launch."""
    stamps = torch.zeros(128, 16, dtype=torch.int64, device=WHERE)
    one.sites[-1].stamps = stamps.data_ptr()
    seconds(work)
    took = stamps[:, 1:7] - stamps[:, :6]
    pairs = zip(PHASES, took.T.double(), strict=True)
    return {name: [int(each.quantile(share)) for share in (0.5, 1)] for name, each in pairs}


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=["deepseek-v2-lite"], metavar="MODEL")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stamps", action="store_true")
    parser.add_argument("--compile", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.models) - set(MODELS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    for model in asked.models:
        run(model, TINY if asked.tiny else MODELS[model], asked)


def run(model: str, sizes: Sizes, asked: argparse.Namespace) -> None:
    """Rows of one model."""
    part, parts = map(int, asked.compile.split("/")) if asked.compile else (0, 1)
    count = 1 if asked.compile else 2 if asked.tiny else asked.layers
    layers = [Layer(sizes, seed) for seed in range(count)]
    draw = torch.Generator(WHERE).manual_seed(3)
    x = torch.randn(1, layers[0].z.hidden, device=WHERE, generator=draw).to(torch.bfloat16)
    want: torch.Tensor | None = None
    for changes in EXPERTS[part::parts]:
        one, apart = "one.flight" in changes, "shared.apart" in changes
        if (one and (WHERE.type == "cpu" or sizes.shared)) or (apart and not sizes.shared):
            continue
        block = Experts(layers, changes, asked.stamps)
        work = partial(chain, block, len(layers), x)
        got = work()
        if asked.compile:
            continue
        want = got if want is None else want
        error = float((got - want).abs().max() / want.abs().max())
        more = {"cycles": phases(block.one, work)} if asked.stamps and block.one is not None else {}
        record(
            {
                "benchmark": "one_token_shared", "device": WHERE.type if WHERE.type == "cpu" else
                torch.cuda.get_device_name(), "model": f"{model}, {count} layers", "date":
                date.today().isoformat(), "changes": changes, "us": round(1e6 * seconds(work) / count, 2),
                "differs": round(error, 5), **more, "command": f"python benchmarks/one_token_shared.py {model}",
            },
            asked.out,
        )  # fmt: skip


if __name__ == "__main__":
    main()
