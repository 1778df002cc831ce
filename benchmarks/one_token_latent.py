"""Time layers of DeepSeek-V2-Lite in bfloat16 for one request on a GPU, chained in one graph: the launches of latent
attention, the experts with the shared ones, and whole layers of both.

    python benchmarks/one_token_latent.py [--parts attention experts layers] [--layers 8] [--compile PART/PARTS]
        [--out FILE.jsonl] [--tiny]

Rows have the microseconds of a layer. No layer's weights are in the card's cache when it is read.

``attention``: queries into latent space, attention and values, for contexts of some lengths. Its sizes are tokens of a
tile and warps (none: the kernel for several requests), most splits, parts that are merged at a time, and whether older
tokens are loaded before the launch waits. ``experts``: changes of the rule's sizes, as a tuning file has them;
``shared.apart``: shared experts have launches of their own. ``layers``: attention and experts, each as before or now.

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

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.contracts.weights import LatentWeights, MoEWeights
from evener_kernels_triton.experts import TritonMoeBlock
from evener_kernels_triton.latent import TritonLatentAttentionBlock, _from_latent_space, _to_latent_space
from evener_kernels_triton.latent_state import LatentState, Parts
from evener_kernels_triton.tuning import LatentTile, Product, Tuning

PAGE, MOST = 32, 4096
WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Kernels ask nothing of it.
DEVICE: Any = SimpleNamespace()
Function = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    hidden: int = 2048
    heads: int = 16
    nope: int = 128
    rope: int = 64
    value: int = 128
    rank: int = 512
    experts: int = 64
    top: int = 6
    inner: int = 1408
    shared: int = 2816


TINY = Sizes(hidden=64, heads=2, nope=16, rope=8, value=16, rank=32, experts=8, top=2, inner=16, shared=32)


@dataclass(frozen=True)
class Choice:
    """Sizes of the launches of attention; see the top of this file."""

    tile: tuple[int, int] | None = (16, 8)
    splits: int = 64
    at_once: int = 32
    early: bool = True


BEFORE = Choice(None, 8, 8, False)
CHOICES = (
    BEFORE, Choice(), Choice(early=False), Choice((32, 8)), Choice((16, 4)),
    Choice((16, 8), 32), Choice((16, 8), 128), Choice((32, 8), 32), Choice((32, 8), 16, 16), Choice(at_once=16),
    Choice(at_once=64), Choice(None, 64),
)  # fmt: skip
#: What a tuning file had before.
OLD = {"shared.apart": 1, "down.n": 16, "down.k": 256, "down.stages": 1}
#: Changes of the sizes of one token's experts.
EXPERTS: Sequence[Mapping[str, int]] = (
    OLD, {"shared.apart": 1, "down.n": 8, "down.k": 256, "down.stages": 1}, {"shared.apart": 1}, {},
    {"down.stages": 1}, {"down.n": 8}, {"down.n": 8, "down.k": 256}, {"down.n": 8, "down.k": 256, "down.stages": 1},
    {"down.n": 8, "down.warps": 8}, {"up.warps": 8}, {"up.n": 2}, {"up.m": 66}, {"up.m": 25}, {"up.n": 2, "up.m": 50},
    {"up.warps": 8, "up.m": 17}, {"up.warps": 8, "up.m": 17, "down.n": 8}, {"up.warps": 8, "down.n": 8},
    {"up.n": 2, "down.n": 8, "down.warps": 8},
)  # fmt: skip


def tuning_here(choice: Choice | None = None) -> Tuning:
    """Launch sizes of this card, with those of a choice."""
    units, shared, overlap = 8, 227 << 10, False
    if WHERE.type == "cuda":
        found: Any = torch.cuda.get_device_properties(0)  # torch's types do not know all fields
        units, shared, overlap = found.multi_processor_count, found.shared_memory_per_block_optin, True
    if choice is None:
        return Tuning(units, shared, overlap)
    splits, at_once = choice.splits, choice.at_once

    class Chosen(Tuning):
        def latent_splits(self, programs: int, requests: int, longest: int, tile: LatentTile) -> int:
            return splits

        def latent_values(self, tokens: int, value: int, rank: int) -> Product:
            return Product(at_once, min(value, 16), min(rank, 512), 8, 1)

    return Chosen(units, shared, overlap)


class ChosenState(LatentState):
    """With the sizes of a choice."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(tuning_here(choice))
        self._choice = choice

    def one_tile(self, tile: LatentTile) -> LatentTile | None:
        tokens, warps = self._choice.tile or (0, 0)
        return LatentTile(tile.m, tokens, warps, 1) if tokens else None

    def attend_parts(
        self, views: Any, meta: Any, query: torch.Tensor, early: bool
    ) -> tuple[torch.Tensor, Parts | None]:
        return super().attend_parts(views, meta, query, early and self._choice.early)


@dataclass
class Layer:
    """Weights and state of one layer."""

    z: Sizes
    seed: int
    latent: LatentWeights = field(init=False)
    moe: MoEWeights = field(init=False)
    pages: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        z, draw = self.z, torch.Generator(WHERE).manual_seed(self.seed)

        def plain(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=WHERE, generator=draw) * 0.02

        def packed(*shape: int) -> PackedWeight:
            data = plain(*shape)
            return PackedWeight("plain", shape, data, data.nbytes)

        ones = torch.ones(z.hidden, dtype=torch.bfloat16, device=WHERE)
        queries, width = z.heads * (z.nope + z.rope), z.rank + z.rope
        kv = packed(z.heads * (z.nope + z.value), z.rank)
        self.latent = LatentWeights(
            ones, packed(queries + width, z.hidden), ones[: z.rank], kv, packed(z.hidden, z.heads * z.value),
            torch.rand(MOST, z.rope, device=WHERE, generator=draw), heads=kv.data,
        )  # fmt: skip
        slots = torch.randperm(z.experts, device=WHERE, generator=draw).int()[:, None].contiguous()
        self.moe = MoEWeights(
            norm=ones, router=packed(z.experts, z.hidden), gate_up=packed(z.experts, 2 * z.inner, z.hidden),
            down=packed(z.experts, z.hidden, z.inner), slots=slots, copies=torch.ones_like(slots[:, 0]),
            shared_gate_up=packed(2 * z.shared, z.hidden), shared_down=packed(z.hidden, z.shared),
        )  # fmt: skip
        self.pages = plain(MOST // PAGE, PAGE * width).view(torch.uint8)


def declared(weight: PackedWeight) -> Any:
    """As a layer declares the weight."""
    *experts, rows, columns = weight.shape
    return SimpleNamespace(
        rows=rows, columns=columns, layout="plain", experts=experts[0] if experts else 0, parts=(), dtype="bfloat16"
    )


def call_of(op: str, static: Mapping[str, Any], variant: Mapping[str, int] | None = None) -> OpCall:
    return OpCall(op, static, Bucket(1, 1), DeviceCapabilities(dtypes=frozenset({"bfloat16"})), variant=variant or {})


class Attention:
    """Latent attention of one request of ``length`` tokens, whose pages are in no order."""

    def __init__(self, layers: Sequence[Layer], choice: Choice, length: int) -> None:
        z, width = layers[0].z, layers[0].z.rank + layers[0].z.rope
        self.layers, self.provider, tuning = layers, ChosenState(choice), tuning_here(choice)
        tensors = (StateTensor("latent", (z.rank,), "bfloat16"), StateTensor("rope", (z.rope,), "bfloat16"))
        spec = StateSpec("latent", tensors)
        how = AttentionSpec(z.heads, width, (z.nope + z.rope) ** -0.5, dtype="bfloat16")
        table = torch.randperm(MOST // PAGE, generator=torch.Generator().manual_seed(1)).int()[None].to(WHERE)
        self.positions, last = torch.tensor([length - 1], device=WHERE).int(), length - 1
        slot = (table[0, last // PAGE] * PAGE + last % PAGE)[None].int()
        starts, lengths = torch.tensor([0, 1], device=WHERE).int(), self.positions + 1
        step = StateStep(
            1, 1, 1, MOST, starts, lengths, self.positions, slot, table, [1], [length], captured=True
        )  # fmt: skip
        self.meta = self.provider.prepare(step, spec, how, PAGE)
        self.views = [self.provider.bind(layer.pages, spec, PAGE) for layer in layers]
        w = layers[0].latent
        static = {
            "hidden": z.hidden, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0, "heads": z.heads, "nope_dim": z.nope,
            "rope_dim": z.rope, "value_dim": z.value, "rank": z.rank, "q_rank": None, "interleaved": True,
            "down": declared(w.down), "o": declared(w.o), "q": None, "sparse": False,
            "state": SimpleNamespace(provider=self.provider, spec=spec, attention=how),
        }  # fmt: skip
        call = call_of("latent_attention_block", static)
        self.block = TritonLatentAttentionBlock(DEVICE, tuning).build(call)
        self.inward, self.outward = _to_latent_space(tuning, call), _from_latent_space(tuning, call)
        draw = torch.Generator(WHERE).manual_seed(2)
        self.query = torch.randn(1, z.heads * (z.nope + z.rope), device=WHERE, generator=draw).to(torch.bfloat16)
        self.row = torch.randn(1, width, device=WHERE, generator=draw).to(torch.bfloat16)
        self.out = torch.empty(1, z.heads * z.value, dtype=torch.bfloat16, device=WHERE)

    def alone(self) -> torch.Tensor:
        """Queries, attention and values of all layers; the sum of the values."""
        total = torch.zeros_like(self.out, dtype=torch.float32)
        for layer, views in zip(self.layers, self.views, strict=True):
            inside = self.inward(self.query, self.row, self.positions, layer.latent, views, self.meta)
            found, parts = self.provider.attend_parts(views, self.meta, inside, True)
            self.outward(found, parts, layer.latent, self.meta, self.out)
        return total + self.out

    def __call__(self, index: int, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, views = self.layers[index].latent, self.views[index]
        found: tuple[torch.Tensor, torch.Tensor] = self.block(x, residual, self.positions, w, views, self.meta)
        return found


class Experts:
    """The experts of all layers, with changed sizes."""

    def __init__(self, layers: Sequence[Layer], variant: Mapping[str, int]) -> None:
        z, w = layers[0].z, layers[0].moe
        assert w.shared_gate_up is not None and w.shared_down is not None
        static = {
            "hidden": z.hidden, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0, "experts": z.experts, "top": z.top,
            "groups": 1, "top_groups": 1, "group_best": 1, "scale": 1.0, "scoring": "softmax", "renormalize": False,
            "inner": z.inner, "activation": "silu", "alpha": 1.0, "limit": 0.0, "router_weight_on_input": False,
            "post_norm": False, "shared_inner": z.shared, "shared_gate": None, "router": declared(w.router),
            "gate_up": declared(w.gate_up), "down": declared(w.down), "shared_gate_up": declared(w.shared_gate_up),
            "shared_down": declared(w.shared_down),
        }  # fmt: skip
        self.layers = layers
        self.block = TritonMoeBlock(DEVICE, tuning_here()).build(call_of("moe_block", static, variant))

    def __call__(self, index: int, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.block(x, residual, self.layers[index].moe)
        return found


def chain(blocks: Sequence[Any], layers: int, x: torch.Tensor) -> torch.Tensor:
    """The stream after some layers of these blocks."""
    residual = torch.zeros(x.shape, device=WHERE)
    for index in range(layers):
        for block in blocks:
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


def cases(
    layers: Sequence[Layer], lengths: Sequence[int], parts: Sequence[str]
) -> list[tuple[dict[str, Any], str, Any]]:
    """What a row says, which rows must agree with each other, and what makes the work that is timed."""
    draw = torch.Generator(WHERE).manual_seed(3)
    x = torch.randn(1, layers[0].z.hidden, device=WHERE, generator=draw).to(torch.bfloat16)
    found: list[tuple[dict[str, Any], str, Any]] = []

    def whole(attention: Choice | None, experts: Mapping[str, int] | None, length: int) -> Function:
        blocks: list[Any] = [] if attention is None else [Attention(layers, attention, length)]
        blocks += [] if experts is None else [Experts(layers, experts)]
        return lambda: chain(blocks, len(layers), x)

    if "attention" in parts:
        for length in lengths:
            for choice in CHOICES:
                row = {"part": "attention", "tokens": length, **vars(choice)}
                make = partial(lambda c, n: Attention(layers, c, n).alone, choice, length)
                found.append((row, f"attention {length}", make))
    if "experts" in parts:
        for variant in EXPERTS:
            found.append(({"part": "experts", "changes": variant}, "experts", partial(whole, None, variant, 1)))
    if "layers" in parts:
        for length in lengths:
            for attention, experts in ((BEFORE, OLD), (Choice(), OLD), (BEFORE, {}), (Choice(), {})):
                row = {"part": "layers", "tokens": length, "attention": "now" if attention.tile else "before"}
                row["experts"] = "before" if experts else "now"
                found.append((row, f"layers {length}", partial(whole, attention, experts, length)))
    return found


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["attention", "experts", "layers"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compile", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    part, parts = map(int, asked.compile.split("/")) if asked.compile else (0, 1)
    count = 1 if asked.compile else 2 if asked.tiny else asked.layers
    layers = [Layer(TINY if asked.tiny else Sizes(), seed) for seed in range(count)]
    lengths = (5, 130) if asked.tiny else (130,) if asked.compile else (130, 300, 1000, 4000)
    agreed: dict[str, torch.Tensor] = {}
    for row, group, make in cases(layers, lengths, asked.parts)[part::parts]:
        work = make()
        got = work().float()
        if asked.compile:
            continue
        want = agreed.setdefault(group, got)
        error = float((got - want).abs().max() / want.abs().max())
        record(
            {
                "benchmark": "one_token_latent", "device": WHERE.type if WHERE.type == "cpu" else
                torch.cuda.get_device_name(), "model": f"DeepSeek-V2-Lite, {count} layers", "date":
                date.today().isoformat(), **row, "us": round(1e6 * seconds(work) / count, 2),
                "differs": round(error, 5), "command": "python benchmarks/one_token_latent.py",
            },
            asked.out,
        )  # fmt: skip


if __name__ == "__main__":
    main()
