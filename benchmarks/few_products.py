"""Time the FP8 products of a layer of Qwen3-8B for few tokens on a GPU, by kernel and by its sizes.

    python benchmarks/few_products.py [FILE] [--tokens 16,64] [--forms fp8-block,fp8] [--seconds 60] [--choice FILE]

``alone``: microseconds of one product with the launch that rounds its activations, in a captured graph that rotates
over weights, so that none is in the cache. ``layer``: the four products with their norms and the activation (no
attention), several layers chained in a graph; ``before``: with the kernels for any number of tokens, ``few``: with
those for few. ``one changed``: a layer with the rule's sizes but of one product, which has one of ``DEEP``.
Results are compared with the reference's rounding first. ``--choice``: the fastest sizes are written there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch
from rounded_products import FORMS, part_of
from stored_products import CUDA, SHAPES, microseconds

import evener_kernels_triton.rounded as module
from evener.contracts.declared import LinearWeight
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import WeightPart
from evener.ops.reference.rounding import rounded
from evener_kernels_triton.composites import enter_rows
from evener_kernels_triton.linear import project_rows
from evener_kernels_triton.rounded import RoundedRows, act_round, norm_round, round_rows, rounded_product, rounds
from evener_kernels_triton.rounded_few import FewSizes, few_sizes, rounded_activated
from evener_kernels_triton.stored import STORED, StoredMatrix
from evener_kernels_triton.tuning import Tuning

LAYERS = 6
#: Bytes that the alternating weights have together, more than any cache.
APART = 384 << 20
WORKERS = 14
#: The rule's sizes, and none: the kernels for any number of tokens.
RULE, NONE = few_sizes, lambda *asked: None
Sizes = dict[str, FewSizes]
#: More sizes with blocks above 32 tokens: one program a unit with a deep ring, in half as many spans or in one, which
#: has no partial sums.
DEEP: Sequence[tuple[str, FewSizes]] = (
    *(("qkv", FewSizes(64, u, p, 1, early)) for u, p, early in ((2, 6, False), (2, 6, True), (1, 12, False))),
    *(("o", FewSizes(64, u, p, s, True)) for u, p, s in ((2, 6, 1), (1, 12, 1), (2, 6, 2), (1, 12, 2))),
    *(("down", FewSizes(64, u, p, s, True)) for u, p, s in ((1, 12, 2), (2, 6, 2), (2, 6, 1))),
    ("down", FewSizes(128, 1, 9, 4, True)),
)  # fmt: skip


def tuning() -> Tuning:
    """Launch sizes of this card."""
    found: Any = torch.cuda.get_device_properties(0)  # torch's types do not know all fields
    return Tuning(
        found.multi_processor_count, found.shared_memory_per_block_optin, True, warpgroups=True, ptx=True, float8=True,
        integers=True,
    )  # fmt: skip


def candidates(name: str, tokens: int, form: str) -> list[FewSizes]:
    """Sizes to try for a product."""
    if tokens <= 32:
        rings = [(64, 1, 6), (64, 1, 10), (64, 2, 4), (64, 2, 5), (128, 1, 5), (128, 2, 3), (128, 2, 5)]
    else:
        rings = [(64, 1, 4), (64, 1, 6), (64, 2, 3), (128, 1, 4), (128, 1, 8), (128, 2, 4), (256, 1, 5)]
    if form == "fp8":  # scales of rows differ in what is added to a sum alone
        rings = rings[::2]
    spans = {"qkv": (2, 4), "o": (2, 4), "gate_up": (1,), "down": (2, 4)}[name]
    more = {64: 1, 128: 2 if name in ("o", "down") else 1, 256: 1 if name == "gate_up" else 2}
    found = [FewSizes(n, u, p, min(8, s * more[n])) for n, u, p in rings for s in spans]
    n, u, p = rings[0]
    return [
        *found,
        *(FewSizes(n, u, p, s, True) for s in spans),
        *(p for each, p in deep(tokens, form) if each == name),
    ]


def deep(tokens: int, form: str) -> Sequence[tuple[str, FewSizes]]:
    """``DEEP`` where it is for."""
    return DEEP if tokens > 32 and form == "fp8-block" else ()


def fused(form: str, tokens: int) -> list[FewSizes]:
    """Sizes of gate and up with the activation inside, which only blocks have."""
    rings = [(6, False), (6, True), (4, False)] if tokens <= 32 else [(5, False), (5, True), (4, False)]
    found = [FewSizes(256, 1, places, 1, early) for places, early in rings]
    return found if form == "fp8-block" else []


def use(sizes: Any, kept: int) -> None:
    """From here on products have these sizes, and activations of up to ``kept`` tokens stay as they are."""
    for key, value in (("few_sizes", sizes), ("MAX_KEPT_TOKENS", kept)):
        setattr(module, key, value)


def by_shape(sizes: Sizes) -> Callable[..., FewSizes]:
    """A rule of measured sizes."""
    table = {SHAPES[name]: p for name, p in sizes.items()}
    return lambda tuning, tokens, rows, columns, form, group: table[rows, columns]


def made(name: str, form: str, seed: int) -> tuple[LinearWeight, StoredMatrix]:
    """A weight's declaration, and what its packing made."""
    rows, columns = SHAPES[name]
    part = part_of(form, rows, columns, seed)
    declared = LinearWeight(name, (part,), rows, columns, "bfloat16", layout=STORED.layout)
    return declared, STORED.pack([part], "bfloat16", CUDA).data


def alone(sizes: Tuning, name: str, tokens: int, w: StoredMatrix, fresh: bool = False) -> Callable[[], torch.Tensor]:
    """A product and the launch before it; ``fresh``: with the same result each time."""
    columns = w.shape[1]
    draw = torch.Generator(CUDA).manual_seed(tokens)
    x = torch.randn(tokens, 2 * columns, generator=draw, device=CUDA).to(torch.bfloat16)
    stream = torch.randn(tokens, columns, generator=draw, device=CUDA)
    gain = torch.ones(columns, device=CUDA, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        if name == "down":
            rows = act_round(sizes, x, columns, "silu", w)
        elif name == "o":
            rows = round_rows(sizes, x[:, :columns], w)
        else:
            residual = stream.clone() if fresh else stream  # the sum is written over it
            rows = norm_round(sizes, x[:, :columns], residual, gain, 1e-6, 0.0, torch.bfloat16, w)[0]
        return rounded_product(sizes, torch.bfloat16, rows, w)

    return run


def layers(
    sizes: Tuning, form: str, tokens: int, weights: Sequence[dict[str, Any]], inside: FewSizes | None = None
) -> Callable[[], torch.Tensor]:
    """Chained layers, as the composites compute them. ``inside``: the activation and its rounding are in the product of
    gate and up, with these sizes."""
    capabilities = DeviceCapabilities(dtypes=frozenset({"bfloat16"}))
    static = {"eps": 1e-6, "offset": 0.0, "dtype": "bfloat16", "hidden": 4096}
    call = OpCall("mlp_block", static, Bucket(tokens, tokens), capabilities)
    gain = torch.ones(4096, device=CUDA, dtype=torch.bfloat16)
    one = weights[0]
    rounding = rounds(sizes, tokens, one["down"][0])
    first = enter_rows(sizes, call, one["qkv"][0])
    second = enter_rows(sizes, call, one["gate_up"][0], "" if rounding else "silu")
    out, last = (project_rows(sizes, call, torch.bfloat16, one[name][0]) for name in ("o", "down"))
    draw = torch.Generator(CUDA).manual_seed(tokens)
    start = torch.randn(tokens, 4096, generator=draw, device=CUDA).to(torch.bfloat16)
    stream = torch.randn(tokens, 4096, generator=draw, device=CUDA)

    def run() -> torch.Tensor:
        x, residual = start, stream.clone()
        for layer in weights:
            wide, residual = first(x, residual, gain, layer["qkv"][1], None)
            x = out(wide[:, :4096], layer["o"][1], None)
            if inside is not None:
                w = layer["gate_up"][1]
                normed, total, _ = norm_round(sizes, x, residual, gain, 1e-6, 0.0, torch.bfloat16, w)
                assert total is not None
                rows = RoundedRows(
                    *rounded_activated(sizes, inside, normed.elements, normed.scales, w, "silu"), 128, tokens
                )
                x, residual = rounded_product(sizes, torch.bfloat16, rows, layer["down"][1]), total
                continue
            wide, residual = second(x, residual, gain, layer["gate_up"][1], None)
            if rounding:
                rows = act_round(sizes, wide, 12288, "silu", layer["down"][1])
                x = rounded_product(sizes, torch.bfloat16, rows, layer["down"][1])
            else:
                x = last(wide, layer["down"][1], None)
        return x

    return run


def compile_all(jobs: Sequence[tuple[str, str, int, FewSizes | None]], index: int) -> None:
    """In a process of its own: every kernel once, so that its compiled form is in the cache."""
    sizes, weights = tuning(), dict[tuple[str, str], tuple[LinearWeight, StoredMatrix]]()
    for name, form, tokens, p in jobs[index::WORKERS]:
        for one in SHAPES if name == "layer" else (name,):
            if (one, form) not in weights:
                weights[one, form] = zeros(one, form)
        use((lambda *asked, p=p: p) if p is not None else NONE, 16 if name == "layer" else 1)
        try:
            if name == "layer":
                use(RULE if p is not None else NONE, 16 if p is None else 1)
                layers(sizes, form, tokens, [{one: weights[one, form] for one in SHAPES}], p)()
            else:
                alone(sizes, name, tokens, weights[name, form][1])()
        except Exception as error:  # seen again when it is timed
            print(f"{name} {form} {tokens} {p}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    torch.cuda.synchronize()


def zeros(name: str, form: str) -> tuple[LinearWeight, StoredMatrix]:
    """As ``made``, without values."""
    (rows, columns), how = SHAPES[name], FORMS[form]
    blocks = (-(-rows // 128), columns // 128) if form == "fp8-block" else (rows, 1)
    elements, scale = torch.zeros(rows, columns, device=CUDA, dtype=torch.uint8), torch.ones(blocks, device=CUDA)
    part = WeightPart(name, rows, columns, how, {"weight": elements.view(torch.float8_e4m3fn), "scale": scale})
    declared = LinearWeight(name, (part,), rows, columns, "bfloat16", layout=STORED.layout)
    return declared, STORED.pack([part], "bfloat16", CUDA).data


class Bench:
    """Rows go to the screen and to ``out``."""

    def __init__(self, out: Path | None) -> None:
        self.sizes, self.out, self.began = tuning(), out, time.perf_counter()
        #: One layer's result by the kernels before.
        self.wanted: dict[tuple[str, int], torch.Tensor] = {}

    def row(self, **row: Any) -> None:
        row["at"] = round(time.perf_counter() - self.began, 1)
        print(json.dumps(row), flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")

    def check(self, name: str, form: str, w: StoredMatrix, tokens: int) -> None:
        """Both kernels against rounded numbers."""
        rows, columns = w.shape
        x = torch.randn(tokens, columns, device=CUDA).to(torch.bfloat16)
        how = FORMS[form].activation
        assert how is not None, "of each form"
        high, wide = w.form.high, w.form.wide or columns
        values = w.elements.view(torch.float8_e4m3fn).double()
        values *= w.scales.double().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        want = rounded(x, how).double() @ values.t()
        row: dict[str, Any] = {"what": "check", "weight": name, "form": form, "tokens": tokens}
        for way, rule in (("before", NONE), ("few", RULE)):
            use(rule, 1)
            for _ in range(3):  # counters are zero again
                try:
                    got = rounded_product(self.sizes, torch.bfloat16, round_rows(self.sizes, x, w), w).double()
                except Exception as error:  # the others are still useful
                    row[way] = str(error)[:200]
                    break
                off = float((got - want).norm() / want.norm())
                row[way] = max(row.get(way, 0.0), round(off, 6)) if off == off else "nan"
        self.row(**row)

    def sweep(self, name: str, form: str, tokens: int, weights: Sequence[StoredMatrix]) -> FewSizes:
        """The fastest sizes of a product."""
        use(NONE, 1)
        wanted = alone(self.sizes, name, tokens, weights[0], True)().float()
        us = microseconds([alone(self.sizes, name, tokens, w) for w in weights])
        self.row(what="alone", weight=name, form=form, tokens=tokens, way="before", us=round(us, 2))
        timed: list[tuple[float, FewSizes]] = []
        for p in candidates(name, tokens, form):
            use(lambda *asked, p=p: p, 1)
            try:
                got = alone(self.sizes, name, tokens, weights[0], True)().float()
                off = float((got - wanted).norm() / wanted.norm())
                us = microseconds([alone(self.sizes, name, tokens, w) for w in weights])
            except Exception as error:  # too large, or refused: the others are still useful
                self.row(what="failed", weight=name, form=form, tokens=tokens, sizes=p, error=str(error)[:200])
                continue
            self.row(what="alone", weight=name, form=form, tokens=tokens, way="few", sizes=p, us=round(us, 2),
                     off=round(off, 5))  # fmt: skip
            if off < 5e-3:
                timed.append((us, p))
        return min(timed)[1] if timed else self.usual(weights[0], tokens, form)

    def usual(self, w: StoredMatrix, tokens: int, form: str) -> FewSizes:
        """The rule's sizes."""
        rows, columns = w.shape
        found = RULE(self.sizes, tokens, rows, columns, w.form, 128 if form == "fp8-block" else 0)
        assert found is not None, "the rule knows these shapes"
        return found

    def layer(self, form: str, tokens: int, weights: Sequence[dict[str, Any]], way: str, rule: Any, kept: int,
              inside: FewSizes | None = None) -> float:  # fmt: skip
        """Microseconds of a layer; infinite if it failed."""
        use(rule, kept)
        row: dict[str, Any] = {"what": "layer", "form": form, "tokens": tokens, "way": way}
        try:
            first = layers(self.sizes, form, tokens, weights[:1], inside)().float()
            wanted = self.wanted.setdefault((form, tokens), first)
            us = microseconds([layers(self.sizes, form, tokens, weights, inside)]) / len(weights)
        except Exception as error:  # the others are still useful
            self.row(**row, error=str(error)[:200])
            return float("inf")
        off = float((first - wanted).norm() / wanted.norm())
        self.row(**row, us=round(us, 2), off=round(off, 5), **({"sizes": inside} if inside else {}))
        return us


def cases(tokens: Sequence[int], forms: Sequence[str]) -> Iterator[tuple[str, str, int, FewSizes | None]]:
    """Every launch that is timed or checked."""
    for form in forms:
        yield from (("layer", form, count, None) for count in tokens)
        yield from (("layer", form, count, p) for count in tokens for p in fused(form, count))
        for name in SHAPES:
            splits = max(p.splits for p in candidates(name, 16, form) if p.n == 64)
            yield from ((name, form, 24, p) for p in (None, FewSizes(64, 1, 6, splits)))
        for name in SHAPES:
            for count in tokens:
                yield from ((name, form, count, p) for p in candidates(name, count, form))
                yield name, form, count, None


def main(out: Path | None, tokens: Sequence[int], forms: Sequence[str], seconds: float, choice: Path | None) -> None:
    """Print a row for each measurement, the most useful ones first; those after ``seconds`` are left out."""
    jobs = list(cases(tokens, forms))
    spawn = multiprocessing.get_context("spawn")
    began = time.perf_counter()
    workers = [spawn.Process(target=compile_all, args=(jobs, index)) for index in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(jobs)} launches compiled in {time.perf_counter() - began:.1f} s", flush=True)
    bench, best = Bench(out), dict[str, dict[str, Any]]()
    for form in forms:
        stacks = [{name: made(name, form, 10 * seed + i) for i, name in enumerate(SHAPES)} for seed in range(LAYERS)]
        for count in (*tokens, 24):
            for name in SHAPES:
                bench.check(name, form, stacks[0][name][1], count)
        for count in tokens:
            before = bench.layer(form, count, stacks, "before", NONE, 16)
            if count <= 16:
                bench.layer(form, count, stacks, "before, rounded", NONE, 1)
            rule = bench.layer(form, count, stacks, "few, the rule's sizes", RULE, 1)
            found = Sizes()
            for name, (rows, columns) in SHAPES.items():
                used = [stack[name][1] for stack in stacks][: max(2, min(LAYERS, APART // (rows * columns)))]
                found[name] = bench.sweep(name, form, count, used)
            for name, p in deep(count, form):
                usual = {each: bench.usual(stacks[0][each][1], count, form) for each in SHAPES}
                way = f"one changed: {name} {tuple(p)}"
                bench.layer(form, count, stacks, way, by_shape(usual | {name: p}), 1, fused(form, count)[0])
            turned = {name: p._replace(early=not p.early) for name, p in found.items()}
            ours = rule, bench.layer(form, count, stacks, "few, each product's best", by_shape(found), 1)
            way = "the same, next launches early or late instead"
            other = bench.layer(form, count, stacks, way, by_shape(turned), 1)
            if other < min(ours):
                found = turned
            early, module.EARLY_TOKENS = module.EARLY_TOKENS, 0 if count <= module.EARLY_TOKENS else count
            bench.sizes = tuning()
            way = "few, the best, rounding lets the output in early or late instead"
            bench.layer(form, count, stacks, way, by_shape(found), 1)
            module.EARLY_TOKENS, bench.sizes = early, tuning()
            of_all = [(bench.layer(form, count, stacks, "few, the best, activation inside", by_shape(found), 1, p), p)
                      for p in fused(form, count)]  # fmt: skip
            inside = min(of_all)[1] if of_all and min(of_all)[0] < min(*ours, other) else None
            best[f"{form} {count}"] = {
                "inside": inside,
                "sizes": found if min(ours[1], other) < rule else None,
                "kept": 1 if min(*ours, other) < before else 16,
            }  # fmt: skip
            bench.row(what="best", form=form, tokens=count, **best[f"{form} {count}"])
            if choice is not None:
                choice.write_text(json.dumps(best))
            if time.perf_counter() - began > seconds:
                print("the rest is left out", flush=True)
                return
        del stacks
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--tokens", default="16,64")
    parser.add_argument("--forms", default="fp8-block,fp8")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--choice", type=Path)
    given = parser.parse_args()
    counts = [int(count) for count in given.tokens.split(",")]
    main(given.file, counts, given.forms.split(","), given.seconds, given.choice)
