"""Time products of rounded activations with weights of 8 bits beside those of activations as they are, on a GPU.

    python benchmarks/rounded_products.py [FILE] [--seconds 300] [--sweep]

Each row: microseconds of one product in a captured graph, rounding included; ``kept``: the same with activations as
they are; ``library``: the same with torch's product of float8 with scales; ``rule``: which of the three a layer takes,
and ``lost``: how much longer that takes than the fastest. Weights alternate, so that none is in the cache.
``--sweep``: other sizes too, with the fastest for each case. Results are compared with the reference's rounding first.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stored_products import CUDA, SHAPES, microseconds

from evener.contracts.declared import LinearWeight
from evener.contracts.quant import QuantFormat, Rounding, WeightPart
from evener.ops.reference.rounding import rounded
from evener_backend_cuda.scaled import scaled_features
from evener_kernels_triton.experts import grouped, sort
from evener_kernels_triton.linear import dequantized, dequantized_linear, few_tokens_linear
from evener_kernels_triton.rounded import MAX_OWN_TOKENS, round_rows, rounded_linear, rounded_product, rounds
from evener_kernels_triton.rounded_experts import rounded_grouped
from evener_kernels_triton.scaled import scaled_product, scaled_refusal
from evener_kernels_triton.stored import STORED, StoredMatrix
from evener_kernels_triton.tuning import Tuning

FP8 = "float8_e4m3fn"
FORMS = {
    "fp8-block": QuantFormat(FP8, 128, 128, scale="float32", activation=Rounding(FP8, 128)),
    "fp8": QuantFormat(FP8, scale="float32", activation=Rounding(FP8)),
    "fp8-tensor": QuantFormat(FP8, -1, scale="float32", activation=Rounding(FP8, -1)),
    "fp8-shared": QuantFormat(FP8, -1, scale="float32", activation=Rounding(FP8, -1)),
    "int8": QuantFormat("int8", scale="float32", activation=Rounding("int8")),
}
#: The scale of activations that have one for all tokens.
FIXED = 0.02
#: Matrices, rows and columns of Qwen3-30B-A3B's experts, and whether gate and up are multiplied.
EXPERTS = {"experts up": (128, 1536, 2048, True), "experts down": (128, 2048, 768, False)}
TOKENS = (32, 64, 128, 256, 1024, 8192)
#: Of the sweep, the most frequent ones first.
SWEPT = (64, 256, 2048)
TOP = 8
#: Bytes that the alternating weights have together, more than any cache.
APART = 256 << 20
Run = Callable[[Tuning, StoredMatrix], torch.Tensor]


def tuning() -> Tuning:
    """Launch sizes of this card."""
    found: Any = torch.cuda.get_device_properties(0)  # torch's types do not know all fields
    able = torch.cuda.get_device_capability() >= (8, 9)
    more = scaled_features(CUDA) if able else set()
    print(f"torch's products of float8: {sorted(more)}", flush=True)
    return Tuning(
        found.multi_processor_count, found.shared_memory_per_block_optin, True, warpgroups=True, ptx=True, float8=able,
        integers=True, scaled_rows="scaled-rows" in more, scaled_blocks="scaled-blocks" in more,
    )  # fmt: skip


def part_of(form: str, rows: int, columns: int, seed: int, device: torch.device = CUDA) -> WeightPart:
    """A part of random numbers whose products are about normal."""
    draw, how = torch.Generator(device).manual_seed(seed), FORMS[form]
    noise = torch.randn(rows, columns, generator=draw, device=device)
    stored = (noise * 32).clamp(-127, 127).to(torch.int8) if form == "int8" else noise.to(torch.float8_e4m3fn)
    shape = (-(-rows // how.group_out), -(-columns // (how.group or columns))) if how.group >= 0 else (1, 1)
    # "fp8-shared": the parts of a weight have the same one, as NVIDIA's exporter writes them.
    by = 1.0 if form == "fp8-shared" else torch.rand(shape, generator=draw, device=device) + 0.5
    scale = torch.ones(shape, device=device) * by * columns**-0.5
    tensors = {"weight": stored, "scale": scale / (32 if form == "int8" else 1)}
    if how.activation is not None and how.activation.group < 0:
        tensors["activation_scale"] = torch.full((1,), FIXED, device=device)
    return WeightPart("w", rows, columns, how, tensors)


def changes(tokens: int, rows: int) -> Iterator[dict[str, int]]:
    """Sizes to try: the rule's, then others."""
    yield {}
    tiles = ((32, 64, 4), (32, 128, 4)) if tokens <= 32 else (
        (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (128, 128, 4), (256, 64, 8), (128, 256, 8),
        (256, 128, 8),
    )  # fmt: skip
    for m, n, warps in tiles:
        if m > max(32, tokens):
            continue
        for stages in (3, 5) if m * n <= 8192 else (3, 4):
            for splits in (1, 2, 4) if tokens <= 256 and rows <= 8192 else (1,):
                yield {"m": m, "n": n, "warps": warps, "stages": stages, "splits": splits}


def grouped_changes(tokens: int) -> Iterator[dict[str, int]]:
    """The same for experts."""
    yield {}
    for m, n, warps in ((16, 64, 4), (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 8), (128, 64, 8),
                        (128, 128, 8)):  # fmt: skip
        if tokens * TOP // 128 // 4 <= m <= max(16, tokens * TOP // 32):
            yield from ({"m": m, "n": n, "warps": warps, "stages": stages} for stages in (3, 5))


class Bench:
    """One run; rows are printed and written to ``out``."""

    def __init__(self, out: Path | None, seconds: float, sweep: bool) -> None:
        self._out, self._until, self._sweep, self.able = out, time.perf_counter() + seconds, sweep, tuning()
        self.sizes = replace(self.able, scaled_rows=False, scaled_blocks=False)

    def row(self, row: dict[str, Any]) -> None:
        """Report it."""
        print(json.dumps(row), flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")

    def fastest(self, run: Run, weights: list[StoredMatrix], tried: Iterator[dict[str, int]]) -> dict[str, Any]:
        """Microseconds with the rule's sizes; after a sweep, with the fastest, and these."""
        found: dict[str, Any] = {}
        for change in tried:
            try:
                us = microseconds([partial(run, self.sizes.with_changes(change), w) for w in weights], 10)
            except Exception as error:  # sizes that do not fit are not tried
                if not change:
                    raise
                found["refused"] = f"{change}: {type(error).__name__}"
                continue
            if not change:
                found["us"] = round(us, 2)
            if us < found.get("best", 1e9):
                found |= {"best": round(us, 2), "with": change}
            if not self._sweep or time.perf_counter() > self._until:
                break
        return found

    def dense(self, name: str, form: str, tokens: int) -> None:
        """One weight of a layer."""
        rows, columns = SHAPES[name]
        count = max(2, APART // (rows * columns)) if tokens <= 1024 else 2
        weights = [STORED.pack([part_of(form, rows, columns, seed)], "bfloat16", CUDA).data for seed in range(count)]
        x = torch.randn(tokens, columns, device=CUDA, dtype=torch.bfloat16)
        how = FORMS[form].activation
        assert how is not None, "of each form"
        want = rounded(x, how) @ dequantized(self.sizes, weights[0], torch.float32).T
        got = rounded_linear(self.sizes, torch.bfloat16, x, weights[0]).float()
        off = float((got - want).norm() / want.norm())
        kept = few_tokens_linear if tokens <= 256 else dequantized_linear
        row: dict[str, Any] = {"weight": name, "form": form, "tokens": tokens, "off": round(off, 5)}
        row["kept"] = round(microseconds([partial(kept, self.sizes, torch.bfloat16, x, w) for w in weights], 10), 2)
        row["rounding"] = round(microseconds([partial(round_rows, self.sizes, x, w) for w in weights], 10), 2)
        refused = scaled_refusal(self.able, rows, columns, weights[0].form, round_rows(self.sizes, x, weights[0]).group)
        if refused is None:
            near = _library(self.able, x, weights[0]).float()
            row["library_off"] = round(float((near - want).norm() / want.norm()), 5)
            row["library"] = round(microseconds([partial(_library, self.able, x, w) for w in weights], 10), 2)
        elif form != "int8":
            row["refused"] = refused
        row |= self.fastest(lambda t, w: rounded_linear(t, torch.bfloat16, x, w), weights, changes(tokens, rows))
        q = round_rows(self.sizes, x, weights[0])
        row["product"] = round(
            microseconds([partial(rounded_product, self.sizes, torch.bfloat16, q, w) for w in weights], 10), 2
        )
        row["tflops"] = round(2e-6 * tokens * rows * columns / row["product"], 1)
        part = WeightPart("w", rows, columns, FORMS[form], {})
        declared = LinearWeight("w", (part,), rows, columns, "bfloat16", layout=STORED.layout)
        many = "library" if refused is None and tokens > MAX_OWN_TOKENS else "us"
        row["rule"] = many if rounds(self.able, tokens, declared) else "kept"
        row["lost"] = round(row[row["rule"]] - min(row[way] for way in ("us", "kept", "library") if way in row), 2)
        self.row(row)
        assert max(off, row.get("library_off", 0)) < 5e-3, f"{name} {form} {tokens}: {row}"

    def experts(self, name: str, form: str, tokens: int) -> None:
        """The experts of a layer, evenly chosen."""
        matrices, rows, columns, both = EXPERTS[name]
        stacks = (([part_of(form, rows, columns, seed * 997 + i)] for i in range(matrices)) for seed in range(2))
        weights = [STORED.pack_stack(stack, matrices, "bfloat16", CUDA).data for stack in stacks]
        draw = torch.Generator(CUDA).manual_seed(1)
        slots = torch.rand(tokens, matrices, generator=draw, device=CUDA).argsort(1)[:, :TOP].int()
        x = torch.randn(tokens * (1 if both else TOP), columns, device=CUDA, dtype=torch.bfloat16)
        out = torch.empty(tokens * TOP, rows // (1 + both), device=CUDA, dtype=torch.bfloat16)
        work = sort(self.sizes, slots, matrices, tokens)
        more: dict[str, Any] = {"share": both, "activation": "silu" if both else ""}

        def exact(t: Tuning, w: StoredMatrix) -> torch.Tensor:
            return grouped(t, x, w, out, work, **more)

        def run(t: Tuning, w: StoredMatrix) -> torch.Tensor:
            return rounded_grouped(t, x, w, out, work, **more)

        how = FORMS[form].activation
        assert how is not None, "of each form"
        near = rounded(x, how).to(torch.bfloat16)  # what bfloat16 loses is less than the check allows
        want = grouped(self.sizes, near, weights[0], torch.empty_like(out), work, **more).float()
        off = float((run(self.sizes, weights[0]).float() - want).norm() / want.norm())
        row: dict[str, Any] = {"weight": name, "form": form, "tokens": tokens, "off": round(off, 5)}
        row["kept"] = round(microseconds([partial(exact, self.sizes, w) for w in weights], 10), 2)
        row |= self.fastest(run, weights, grouped_changes(tokens))
        self.row(row)
        assert off < 2e-2, f"{name} {form} {tokens}: {off}"


def _library(able: Tuning, x: torch.Tensor, w: StoredMatrix) -> torch.Tensor:
    q = round_rows(able, x, w)
    return scaled_product(q.elements, q.scales, w)[: q.tokens]


def main(out: Path | None, seconds: float, sweep: bool) -> None:
    """Print a row for each case, the most frequent ones first; cases after ``seconds`` are left out."""
    logging.basicConfig(level=logging.INFO)
    bench, until = Bench(out, seconds, sweep), time.perf_counter() + seconds
    cases: list[partial[None]] = []
    if sweep:
        for form in ("fp8-block", "fp8"):
            for tokens in SWEPT:
                cases += [partial(bench.dense, name, form, tokens) for name in SHAPES]
                cases += [partial(bench.experts, name, form, tokens) for name in EXPERTS]
    else:
        for tokens in TOKENS:
            cases += [partial(bench.dense, name, form, tokens) for form in FORMS for name in SHAPES]
            cases += [partial(bench.experts, name, "fp8-block", tokens) for name in EXPERTS]
    failed = []
    for case in cases:
        if time.perf_counter() > until:
            print(f"{len(cases) - cases.index(case)} cases are left out", flush=True)
            break
        try:
            case()
        except Exception as error:  # the other rows are still useful
            failed.append(f"{case.args}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {failed[-1]}", flush=True)
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"{len(failed)} cases failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    main(given.file, given.seconds, given.sweep)
