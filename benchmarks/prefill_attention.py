"""Attention of prompts on one GPU: the kernel for any mix of lengths beside the one for long queries.

    python benchmarks/prefill_attention.py [--check] [--time] [--pages N ...] [--sizes TOKENS+BEFORE ...] [--out FILE]

``--check`` compares with float32 arithmetic over pools whose unwritten places hold no numbers; ``--time`` prints
milliseconds of each kernel and TFLOP/s, of the scores that queries see.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor

#: Query heads, key heads, numbers of a head.
SHAPES = {"qwen3-8b": (32, 8, 128), "gemma-3-4b": (8, 4, 256), "heads of 64": (32, 8, 64)}
#: (new tokens, tokens before) of each request.
MIXES = (
    [(1, 0), (1, 900), (5, 300), (128, 0), (200, 77), (513, 1000)], [(777, 0)], [(64, 1), (300, 129), (2, 4000)],
    [(2048, 0), (2048, 4096)], [(40, 0)] * 150, [(1, 17)] * 5 + [(1500, 0)],
)  # fmt: skip
LIMIT = 6e-3


@dataclass
class Case:
    """Pages with keys and values, queries, and the metadata for them."""

    provider: Any
    views: Any
    meta: Any
    query: torch.Tensor

    def attend(self) -> torch.Tensor:
        result: torch.Tensor = self.provider.attend(self.views, self.meta, self.query)
        return result


def providers() -> tuple[Any, Any]:
    """With the kernel for any mix alone, and with that for long queries wherever it can be."""
    from evener_backend_cuda.capability import capabilities
    from evener_kernels_triton.state import PagedState
    from evener_kernels_triton.tuning import LongTile, Tuning

    class Always(Tuning):
        def long_tile(self, wide: int) -> LongTile | None:
            tile = super().long_tile(wide)
            return tile and replace(tile, least=0)

    p: Any = torch.cuda.get_device_properties(0)
    can = capabilities((p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin)
    plain = Tuning.of(replace(can, features=can.features - {"warpgroups"}))
    return PagedState(plain), PagedState(Always.of(can))


def make(
    shape: tuple[int, int, int], page: int, window: int, requests: Sequence[tuple[int, int]],
    kind: torch.dtype = torch.bfloat16, unwritten: float = math.nan,
) -> tuple[Case, Case, Callable[[], torch.Tensor]]:  # fmt: skip
    """A case for each provider over the same pages, and the result in float32."""
    heads, kv_heads, d = shape
    need = [-(-(count + before) // page) for count, before in requests]
    order = torch.randperm(sum(need)) + 1
    # What follows a request's pages in the table names pages of others.
    table = torch.randint(0, sum(need) + 1, (len(requests), max(need) + 3), dtype=torch.int32)
    for row, blocks in enumerate(order.split(need)):
        table[row, : len(blocks)] = blocks
    tensors = tuple(StateTensor(name, (kv_heads, d), str(kind).removeprefix("torch.")) for name in ("key", "value"))
    spec = StateSpec("window" if window else "full", tensors, window=window or None)
    attention = AttentionSpec(heads, d, d**-0.5, dtype=tensors[0].dtype)
    size = spec.nbytes * page // kind.itemsize
    storage = torch.full((sum(need) + 1, size), unwritten, dtype=kind, device="cuda").view(torch.uint8)
    table = table.cuda()
    counts, lengths = [c for c, _ in requests], [c + b for c, b in requests]
    start = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    tokens = sum(counts)
    ints = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    step = StateStep(
        tokens, len(requests), max(counts), max(lengths), start, torch.tensor(lengths, device="cuda").int(), ints, ints,
        table, counts, lengths,
    )  # fmt: skip
    query = torch.randn(tokens, heads, d, dtype=kind, device="cuda")
    cases = []
    for provider in providers():
        views = provider.bind(storage, spec, page)
        cases.append(Case(provider, views, provider.prepare(step, spec, attention, page), query))
    places = []
    for row, n in enumerate(lengths):
        at = torch.arange(n, device="cuda")
        places.append((table[row, at // page].long(), at % page))
        for part in (views.keys, views.values):
            part[places[-1][0], :, places[-1][1]] = torch.randn(n, kv_heads, d, dtype=kind, device="cuda")

    def reference() -> torch.Tensor:
        found = []
        for (count, before), (blocks, offsets), q in zip(requests, places, query.split(counts), strict=True):
            k, v = (
                p[blocks, :, offsets].float().repeat_interleave(heads // kv_heads, 1)
                for p in (views.keys, views.values)
            )
            distance = torch.arange(before, before + count, device="cuda")[:, None] - torch.arange(
                len(k), device="cuda"
            )
            unseen = (distance < 0) | (distance >= (window or 1 << 30))
            weights = (torch.einsum("qhd,khd->hqk", q.float(), k) * d**-0.5).masked_fill(unseen, -math.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(found)

    return cases[0], cases[1], reference


def check_one(job: tuple[str, int, int, torch.dtype]) -> str:
    """One shape over all mixes."""
    name, page, window, kind = job
    torch.manual_seed(page + window)
    wrong = []
    for requests in MIXES:
        _, case, reference = make(SHAPES[name], page, window, requests, kind)
        assert case.meta.long is not None
        want = reference()
        for _ in range(3):
            got = case.attend().float()
            error = ((got - want).norm() / want.norm()).item()
            if not error < LIMIT:
                rows = ((got - want).abs().amax((1, 2)) < 0.1).logical_not().nonzero().flatten().tolist()
                wrong.append(f"  {requests[:4]}: {error:.2e}, {len(rows)} tokens: {rows[:3]} .. {rows[-3:]}")
                break
    return "\n".join([f"{name}, pages of {page}, window {window}, {kind}: {'WRONG' if wrong else 'agrees'}", *wrong])


def seen(requests: Sequence[tuple[int, int]], window: int) -> int:
    """Pairs of a query and a key that it sees."""
    return sum(sum(min(at, window or at) for at in range(b + 1, b + c + 1)) for c, b in requests)


def time_one(name: str, page: int, window: int, tokens: int, before: int) -> dict[str, Any]:
    """Requests of so many tokens, as many as make 16,384."""
    import triton

    shape = SHAPES[name]
    requests = [(tokens, before)] * max(1, 16384 // tokens)
    old, new, _ = make(shape, page, window, requests, unwritten=0.0)
    flops = 4 * shape[0] * shape[2] * seen(requests, window)
    row = {"shape": name, "page": page, "window": window, "requests": len(requests), "tokens": tokens, "before": before}
    results = [case.attend().float() for case in (old, new)]
    row["difference"] = float(f"{((results[0] - results[1]).norm() / results[0].norm()).item():.1e}")
    del results
    for label, case in (("any mix", old), ("long", new)):
        ms = triton.testing.do_bench(case.attend, warmup=10, rep=60, return_mode="median")
        row |= {f"{label}, ms": round(ms, 4), f"{label}, TFLOP/s": round(flops / ms / 1e9)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--pages", type=int, nargs="*", default=[32])
    parser.add_argument("--sizes", nargs="*", default=["512+0", "2048+0", "16384+0", "65536+0"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--windows", type=int, nargs="*", default=[0, 1024])
    parser.add_argument("--out", default=os.devnull)
    args = parser.parse_args()
    if args.check:
        jobs = [(name, page, window, kind) for name in args.shapes for page in args.pages for window in args.windows
                for kind in (torch.bfloat16, torch.float16)]  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(min(14, len(jobs))) as pool:
            for text in pool.imap(check_one, jobs):
                print(text, flush=True)
    if args.time:
        with open(args.out, "w") as file:
            for name in args.shapes:
                for window in args.windows:
                    for size in args.sizes:
                        tokens, before = map(int, size.split("+"))
                        if window and tokens + before <= window:
                            continue
                        row = time_one(name, args.pages[0], window, tokens, before)
                        print(json.dumps(row), flush=True)
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
