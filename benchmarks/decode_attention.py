"""Attention of decode steps on one GPU, a layer at a time: the kernel with splits beside the one with even parts.

    python benchmarks/decode_attention.py [--check] [--time] [--shapes NAME ...] [--cases CASE ...] [--out FILE]

A case is REQUESTSxTOKENS or the tokens of each request with commas. ``--check`` compares with float32 arithmetic over
pools whose unwritten places hold no numbers. ``--time`` prints microseconds of a launch in a captured graph of many,
over several layers with their own state, and the share of the read floor: bytes of keys and values that queries see, at
the speed at which a kernel reads 4 GiB in the same run. ``--sweep``: the same of the kernel with splits in other sizes,
given as keys of a tile, warps, stages and splits (0: as the rule says).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor

#: Query heads, key heads, numbers of a head, window.
SHAPES = {
    "qwen3-8b": (32, 8, 128, 0), "gemma-3-4b": (8, 4, 256, 0), "gemma-3-4b window": (8, 4, 256, 1024),
    "heads of 64": (32, 8, 64, 0), "qwen3-30b-a3b": (32, 4, 128, 0),
}  # fmt: skip
#: Tokens of each request, the new one included.
MIXES = ([1], [31, 32, 33], [1024, 1, 77, 4001], [16384], [70000, 3], [500] * 40, [100 + 37 * i for i in range(140)])
LIMIT = 6e-3
#: Keys of a tile, warps, stages and splits of a sweep.
SIZES = (
    (64, 4, 3, 0), (64, 4, 2, 0), (64, 4, 2, 2), (64, 4, 4, 0), (32, 4, 3, 0), (32, 4, 4, 0), (32, 2, 3, 0),
    (32, 2, 4, 0), (32, 4, 3, 2), (64, 2, 2, 0), (128, 4, 2, 0), (128, 8, 2, 0),
)  # fmt: skip


# Triton 3.6 takes each name in an annotation for a global variable that the kernel reads.
@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(source, out, BLOCK: tl.constexpr, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program reads TIMES * BLOCK int32."""
    total = tl.zeros([BLOCK], tl.int32)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * TIMES)
    for i in range(TIMES):
        total += tl.load(source + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_speed() -> float:
    """Bytes a second."""
    source = torch.randint(0, 9, (1 << 30,), dtype=torch.int32, device="cuda")
    out = torch.empty((1 << 30) // (8192 * 16), dtype=torch.int32, device="cuda")

    def read() -> None:
        read_kernel[(len(out),)](source, out, 8192, 16, num_warps=8)

    return float(4 * len(source) / triton.testing.do_bench(read, return_mode="median") * 1e3)


@dataclass
class Case:
    """The state of some layers, queries, and the metadata for them."""

    provider: Any
    layers: list[Any]
    meta: Any
    query: torch.Tensor
    reference: Callable[[], torch.Tensor]
    spec: StateSpec

    def attend(self, layer: int = 0) -> torch.Tensor:
        result: torch.Tensor = self.provider.attend(self.layers[layer], self.meta, self.query)
        return result


def provider_of(even: bool, sizes: tuple[int, int, int, int] | None = None) -> Any:
    """With the kernel of even parts wherever it can be, or without; ``sizes`` of the other one, as of ``SIZES``."""
    from evener_backend_cuda.capability import capabilities
    from evener_kernels_triton.state import PagedState
    from evener_kernels_triton.tuning import EvenTile, Tuning

    class Changed(Tuning):
        def even_tile(self, wide: int) -> EvenTile | None:
            tile = super().even_tile(wide)
            return replace(tile, heads=1 << 20) if tile and even else None

        def decode_tile(self, wide: int, element: int) -> tuple[int, int, int]:
            return sizes[:3] if sizes else super().decode_tile(wide, element)

        def splits(self, programs: int, longest: int, tile: int) -> int:
            return sizes[3] if sizes and sizes[3] else super().splits(programs, longest, tile)

    p: Any = torch.cuda.get_device_properties(0)
    return PagedState(
        Changed.of(capabilities((p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin))
    )


def make(
    provider: Any, shape: tuple[int, int, int, int], page: int, lengths: Sequence[int], layers: int = 1,
    kind: torch.dtype = torch.bfloat16, unwritten: float = math.nan,
) -> Case:  # fmt: skip
    heads, kv_heads, d, window = shape
    need = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(need)) + 1
    # What follows a request's pages in the table names pages of others.
    table = torch.randint(0, sum(need) + 1, (len(lengths), (max(need) + 18) // 16 * 16), dtype=torch.int32)
    for row, blocks in enumerate(order.split(need)):
        table[row, : len(blocks)] = blocks
    tensors = tuple(StateTensor(name, (kv_heads, d), str(kind).removeprefix("torch.")) for name in ("key", "value"))
    spec = StateSpec("window" if window else "full", tensors, window=window or None)
    attention = AttentionSpec(heads, d, d**-0.5, dtype=tensors[0].dtype)
    size = spec.nbytes * page // kind.itemsize
    table = table.cuda()
    count = len(lengths)
    ints = torch.zeros(count, dtype=torch.int32, device="cuda")
    step = StateStep(
        count, count, 1, max(1 << 17, *lengths), torch.arange(count + 1, device="cuda").int(),
        torch.tensor(lengths, device="cuda").int(), ints, ints, table, [1] * count, list(lengths),
        captured=True,
    )  # fmt: skip
    query = torch.randn(count, heads, d, dtype=kind, device="cuda")
    views, places = [], []
    for row, n in enumerate(lengths):
        at = torch.arange(n, device="cuda")
        places.append((table[row, at // page].long(), at % page))
    for _ in range(layers):
        storage = torch.full((sum(need) + 1, size), unwritten, dtype=kind, device="cuda").view(torch.uint8)
        views.append(provider.bind(storage, spec, page))
        for blocks, offsets in places:
            for part in (views[-1].keys, views[-1].values):
                part[blocks, :, offsets] = torch.randn(len(offsets), kv_heads, d, dtype=kind, device="cuda")

    def reference() -> torch.Tensor:
        found = []
        for (blocks, offsets), q in zip(places, query, strict=True):
            first = max(0, len(blocks) - window) if window else 0
            k, v = (p[blocks[first:], :, offsets[first:]].float() for p in (views[0].keys, views[0].values))
            grouped = q.float().unflatten(0, (kv_heads, -1))
            weights = (torch.einsum("hgd,khd->hgk", grouped, k) * d**-0.5).softmax(-1)
            found.append(torch.einsum("hgk,khd->hgd", weights, v).flatten(0, 1))
        return torch.stack(found)

    return Case(provider, views, provider.prepare(step, spec, attention, page), query, reference, spec)


def check(name: str, page: int, kind: torch.dtype) -> str:
    """One shape over all mixes; each is attended four times, because a race would not show every time."""
    torch.manual_seed(page)
    wrong = []
    for lengths in MIXES:
        case = make(provider_of(True), SHAPES[name], page, lengths, kind=kind)
        assert case.meta.decode.even is not None
        want = case.reference()
        for turn in range(4):
            got = case.attend().float()
            error = ((got - want).norm() / want.norm()).item()
            if not error < LIMIT:
                rows = ((got - want).abs().amax((1, 2)) < 0.1).logical_not().nonzero().flatten().tolist()
                wrong.append(f"  {lengths[:4]} turn {turn}: {error:.2e}, {len(rows)} requests: {rows[:3]} ..")
                break
    return "\n".join([f"{name}, pages of {page}, {kind}: {'WRONG' if wrong else 'agrees'}", *wrong])


def time_layers(case: Case) -> float:
    """Microseconds of one launch in a captured graph."""
    layers, launches = len(case.layers), 24
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                case.attend(i % layers)
    torch.cuda.synchronize()
    ms = triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median")
    return float(ms / launches * 1e3)


def state_bytes(shape: tuple[int, int, int, int], lengths: Sequence[int]) -> int:
    _, kv_heads, d, window = shape
    return sum(min(n, window or n) for n in lengths) * kv_heads * d * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--page", type=int, default=32)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--cases", nargs="*", default=["1x16384", "8x16384", "1x65536", "8x65536"])
    parser.add_argument("--out", default=os.devnull)
    args = parser.parse_args()
    if args.check:
        for name in args.shapes:
            for kind in (torch.bfloat16, torch.float16):
                print(check(name, args.page, kind), flush=True)
    if args.time or args.sweep:
        speed = read_speed()
        print(f"{torch.cuda.get_device_name()}: reads {speed / 1e12:.2f} TB/s", flush=True)
        with open(args.out, "w") as file:
            for name in args.shapes:
                for text in args.cases:
                    row = {"device": torch.cuda.get_device_name(), "read_tb_s": round(speed / 1e12, 2), "shape": name,
                           "page": args.page, "case": text}  # fmt: skip
                    found = time_one(name, args.page, text, speed) if args.time else {}
                    row |= {**found, **(sweep(name, args.page, text, speed) if args.sweep else {})}
                    print(json.dumps(row), flush=True)
                    file.write(json.dumps(row) + "\n")


def lengths_of(text: str) -> list[int]:
    """Tokens of each request of a case."""
    count, x, tokens = text.partition("x")
    return [int(tokens)] * int(count) if x else [int(n) for n in text.split(",")]


def time_one(name: str, page: int, text: str, speed: float) -> dict[str, Any]:
    """Microseconds and shares of both kernels."""
    lengths = lengths_of(text)
    nbytes = state_bytes(SHAPES[name], lengths)
    floor = nbytes / speed * 1e6
    row: dict[str, Any] = {"floor_us": round(floor, 2)}
    for label, even in (("splits", False), ("even", True)):
        us = time_layers(make(provider_of(even), SHAPES[name], page, lengths, layers_of(nbytes), unwritten=0.0))
        row |= {f"{label}_us": round(us, 2), f"{label}_share": round(floor / us, 3)}
    return row


def layers_of(nbytes: int) -> int:
    """So many layers with ``nbytes`` of state that no cache holds them."""
    return max(2, min(12, 1 + (600 << 20) // nbytes))


def sweep(name: str, page: int, text: str, speed: float) -> dict[str, Any]:
    """Microseconds of the kernel with splits, by its sizes."""
    lengths = lengths_of(text)
    nbytes = state_bytes(SHAPES[name], lengths)
    made = make(provider_of(False), SHAPES[name], page, lengths, layers_of(nbytes), unwritten=0.0)
    found = {}
    for sizes in SIZES:
        try:
            provider = provider_of(False, sizes)
            meta = provider.prepare(made.meta.step, made.spec, made.meta.attention, page)
            us = time_layers(replace(made, provider=provider, meta=meta))
        except Exception as error:  # sizes that do not fit are not tried
            found[str(sizes)] = type(error).__name__
            continue
        found[str(sizes)] = f"{us:.2f}"
    return {"floor_us": round(nbytes / speed * 1e6, 2), "sweep": found}


if __name__ == "__main__":
    main()
