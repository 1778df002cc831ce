"""Check and time linear layers over packed weights with Triton's kernels, on a GPU.

Formats: GGUF's blocks, integers of four bits in groups, MXFP4, NVFP4, and the tables of NF4 and FP4.

    python benchmarks/packed_products.py [--sweep SECONDS] [--best BEST] [FILE]

First each format is compared with its dequantized values. Then each row: microseconds of one product in a captured
graph, and the share of the time that reading the weight takes at the card's read speed, which is measured first.
``--sweep``: other sizes of tiles too; the rows say what the fastest were, and BEST gets them, for ``packed_steps.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from stored_products import APART, CUDA, SHAPES, microseconds, tuning

from evener.contracts.quant import BLOCKS, MXFP4, NVFP4, QuantFormat, WeightPart, block_format
from evener_kernels_triton.linear import dequantized, dequantized_linear, few_tokens_linear
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.tuning import Tuning

INT4 = {
    "int4": QuantFormat("uint4", 128, scale="bfloat16"),
    "int4-zeros": QuantFormat("uint4", 128, scale="float16", zero="uint8"),
    "int4-act": QuantFormat("uint4", 128, scale="float16", order="act"),
}
FORMS: dict[str, QuantFormat] = {
    **INT4, **{storage: block_format(storage) for storage in BLOCKS}, "mxfp4": MXFP4, "nvfp4": NVFP4,
    "nf4": QuantFormat("nf4", 64, scale="float32"), "fp4": QuantFormat("fp4", 128, scale="float32"),
}  # fmt: skip
#: Formats that are timed at all sizes and tokens, and those that are timed for gate and up at few.
TIMED = ("int4", "q4_k", "q6_k")
BRIEFLY = ("int4-zeros", "q8_0", "q4_0", "q5_k", "q3_k", "q2_k", "mxfp4", "nvfp4", "nf4")
#: Formats whose other sizes are tried, with the tokens.
SWEPT = {"int4": (1, 16, 64, 256), "q4_k": (1, 64), "q6_k": (1,)}
EXPERTS = ("int4", "q4_k", "q6_k", "mxfp4", "nvfp4", "nf4")
TOKENS = (1, 16, 64, 256)
#: Form, name of a shape, tokens, and changes of sizes.
Job = tuple[str, str, int, dict[str, int]]


def part_of(form: str, rows: int, columns: int, seed: int, where: torch.device = CUDA) -> WeightPart:
    """Random bits of a format, whose numbers are of the size of a model's, made on ``where``."""
    draw, how = torch.Generator(where).manual_seed(seed), FORMS[form]

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(256, shape, generator=draw, dtype=torch.uint8, device=where)

    def scales(size: float, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=draw, device=where) + 0.5) * size

    if form == "mxfp4":
        tensors = {"weight": bits(rows, columns // 32, 16), "scale": bits(rows, columns // 32) % 4 + 118}
    elif how.storage in ("float4_e2m1", "nf4", "fp4"):
        tensors = {"weight": bits(rows, columns // 2)}
        size = 1.0 if form == "nvfp4" else 0.05
        tensors["scale"] = scales(size, rows, columns // how.group).to(getattr(torch, str(how.scale)))
        if form == "nvfp4":
            tensors["factor"] = scales(0.008, 1)[0]
        else:
            tensors["table"] = scales(2.0, 16) - 2.0
    elif how.storage == "uint4":
        groups = how.row_scales(columns)
        tensors = {"weight": bits(rows, columns // 2)}
        tensors["scale"] = scales(0.004, rows, groups).to(getattr(torch, str(how.scale)))
        if how.zero:
            tensors["zero"] = bits(rows, groups) % 16
        if how.order == "act":
            index = torch.arange(columns, device=where, dtype=torch.int32) // how.group
            tensors["group_index"] = index[torch.randperm(columns, generator=draw, device=where)]
    else:
        count, nbytes = columns // BLOCKS[how.storage][0], BLOCKS[how.storage][1]
        data = bits(rows, count, nbytes)
        usual = (0, 2) if form[3:] in ("k", "1") else (0,)
        places = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(form, usual)
        for at in places:
            data[..., at : at + 2] = scales(1e-4 if form[3:] == "k" else 4e-3, rows, count, 1).half().view(torch.uint8)
        tensors = {"weight": data.flatten(1)}
    return WeightPart(form, rows, columns, how, tensors)


def packed(form: str, rows: int, columns: int, seed: int) -> PackedMatrix:
    """A packed weight on the card."""
    matrix: PackedMatrix = PACKED.pack([part_of(form, rows, columns, seed)], "bfloat16", CUDA).data
    return matrix


def check(form: str) -> tuple[str, bool]:
    """Compare a format with the numbers that the kit says it has, at sizes with torn tiles: a line, and whether it is
    off."""
    from evener_conformance.kit.cases.blocks import reference_dequantize

    torch.set_num_threads(1)
    sizes, host, worst = _tuning(), torch.device("cpu"), dict[str, float]()
    for columns in (1280, 320) if form in ("int4", "q4_0", "mxfp4", "nvfp4", "nf4") else (1280,):
        parts = [part_of(form, rows, columns, rows, host) for rows in (70, 131)]
        want_values = torch.cat([reference_dequantize(part) for part in parts]).to(CUDA)
        matrix = PACKED.pack(parts, "bfloat16", CUDA).data
        copy, bias = dequantized(sizes, matrix, torch.float32), torch.randn(201, device=CUDA)
        worst[f"{columns} copy"] = float((copy - want_values).norm() / want_values.norm())
        cases = [(tokens, torch.bfloat16) for tokens in (1, 17, 300)]
        for tokens, dtype in [*cases, (2, torch.float16)]:
            x = torch.randn(tokens, columns, device=CUDA).to(dtype)
            product = few_tokens_linear if tokens <= 256 else dequantized_linear
            got = product(sizes, dtype, x, matrix, bias.to(dtype)).float()
            want = x.float() @ want_values.T + bias.to(dtype).float()
            worst[f"{columns} {tokens} {str(dtype)[6:]}"] = float((got - want).norm() / want.norm())
    bad = {name: f"{off:.1e}" for name, off in worst.items() if not off < (1e-5 if "copy" in name else 8e-3)}
    line = f"check {form}: worst {max(worst.values()):.1e}"
    return (f"{line} WRONG {bad}" if bad else line), bool(bad)


def check_experts(form: str) -> tuple[str, bool]:
    """The same for stacks of matrices, with and without an activation."""
    from evener_conformance.kit.cases.blocks import reference_dequantize
    from evener_kernels_triton.experts import grouped, sort
    from evener_kernels_triton.packed_experts import ExpertAssignment

    torch.set_num_threads(1)
    sizes, host, worst = _tuning(), torch.device("cpu"), dict[str, float]()
    matrices = [[part_of(form, rows, 512, 7 * i + rows, host) for rows in (96, 96)] for i in range(5)]
    values = torch.stack([torch.cat([reference_dequantize(part) for part in parts]) for parts in matrices]).to(CUDA)
    stack = PACKED.pack_stack(iter(matrices), 5, "bfloat16", CUDA).data
    for tokens, activation in ((1, "silu"), (3, ""), (16, "silu"), (16, "clamped_swiglu"), (40, "silu"), (300, "")):
        x = torch.randn(tokens, 512, device=CUDA).to(torch.bfloat16)
        slots = torch.stack([torch.randperm(5, device=CUDA)[:2] for _ in range(tokens)]).int()
        slots[0, 1] = -1
        y = torch.zeros(tokens * 2, 96 if activation else 192, device=CUDA, dtype=torch.bfloat16)
        work = sort(sizes, slots, 5, tokens) if tokens > 16 else ExpertAssignment(slots, None, None)
        grouped(sizes, x, stack, y, work, share=True, activation=activation, alpha=1.702, limit=7.0)
        all_rows = torch.einsum("tc,mrc->tmr", x.float(), values)
        want = torch.gather(all_rows, 1, slots.clamp(min=0).long()[..., None].expand(-1, -1, 192))
        if activation == "silu":
            want = torch.nn.functional.silu(want[..., :96]) * want[..., 96:]
        elif activation:
            gate, up = want[..., ::2].clamp(max=7), want[..., 1::2].clamp(-7, 7) + 1
            want = gate * torch.sigmoid(1.702 * gate) * up
        want = (want * (slots >= 0)[..., None]).flatten(0, 1)
        worst[f"{tokens} {activation}"] = float((y.float() - want).norm() / want.norm())
    bad = {name: f"{off:.1e}" for name, off in worst.items() if not off < 1.2e-2}
    line = f"check experts in {form}: worst {max(worst.values()):.1e}"
    return (f"{line} WRONG {bad}" if bad else line), bool(bad)


def changes(tokens: int) -> Iterator[dict[str, int]]:
    """Sizes to try."""
    tiles: Sequence[Any] = ((8, 16, 1), (8, 32, 2), (8, 64, 2), (8, 64, 4), (8, 128, 4))
    stages: Sequence[int] = (3, 4)
    splits: Sequence[int] = (1, 2, 4, 8)
    if tokens == 16:
        tiles, stages = ((16, 32, 2), (16, 64, 2), (16, 64, 4)), (3,)
    elif tokens == 64:
        tiles, stages, splits = ((64, 32, 2), (64, 64, 2), (64, 64, 4), (64, 128, 4), (32, 64, 2)), (2, 3), (1, 2)
    elif tokens > 64:
        tiles = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 4), (256, 64, 8))
        stages, splits = (2, 3), (1,)
    for (m, n, warps), count, parts in itertools.product(tiles, stages, splits):
        yield {"m": m, "n": n, "warps": warps, "stages": count, "splits": parts}


def compile_one(job: Job) -> str:
    """Compile the kernel of a job into the cache on disk; returns an error."""
    form, name, tokens, change = job
    torch.set_num_threads(1)
    x = torch.zeros(tokens, SHAPES[name][1], device=CUDA, dtype=torch.bfloat16)
    try:
        few_tokens_linear(_tuning().with_changes(change), torch.bfloat16, x, _operand(form, name))
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return ""


@cache
def _tuning() -> Tuning:
    return tuning()


@cache
def _operand(form: str, name: str) -> PackedMatrix:
    return packed(form, *SHAPES[name], 0)


def sweep(until: float, best: Path | None, out: Path | None, errors: Collection[str]) -> None:
    """Time other sizes for the most important formats, until so many seconds of the clock."""
    found: dict[str, dict[str, int]] = {}
    cases = [
        (form, tokens, name) for form, counts in SWEPT.items() for tokens in counts
        for name in ("gate_up", "o", "down", "qkv")
    ]  # fmt: skip
    for form, tokens, name in cases:
        if time.monotonic() > until:
            print("no time for the rest")
            break
        weights, times = _weights(form, *SHAPES[name])[:8], list[tuple[float, dict[str, int]]]()
        x = torch.randn(tokens, SHAPES[name][1], device=CUDA, dtype=torch.bfloat16)
        for change in changes(tokens):
            sizes = _tuning().with_changes(change)
            if str((form, tokens, change)) in errors:
                continue
            try:
                us = microseconds([partial(few_tokens_linear, sizes, torch.bfloat16, x, w) for w in weights], 5)
            except Exception as error:  # it is one of many
                print(change, str(error)[:200])
                continue
            times.append((us, change))
        times.sort(key=lambda of: of[0])
        for us, change in times[:3]:
            report({"sweep": name, "form": form, "tokens": tokens, "us": round(us, 2), **change}, out)
        if times:
            rows, columns = SHAPES[name]
            found[f"{form} {tokens} {rows} {columns}"] = times[0][1]
    if best is not None:
        best.write_text(json.dumps(found))


def _weights(form: str, rows: int, columns: int) -> list[PackedMatrix]:
    one = packed(form, rows, columns, 0)
    return [one, *(packed(form, rows, columns, seed) for seed in range(1, max(2, APART // _bytes(one))))]


def _bytes(matrix: PackedMatrix) -> int:
    return sum(tensor.nbytes for segment in matrix.segments for tensor in segment.tensors())


def report(row: dict[str, Any], out: Path | None) -> None:
    """Print a row, and add it to a file."""
    print(json.dumps(row), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")


def read_speed() -> float:
    """Of the card's memory, in TB/s."""
    block = torch.empty(APART * 8, dtype=torch.uint8, device=CUDA).view(torch.int64)
    return APART * 8 / microseconds([block.max], 5) / 1e6


def main(out: Path | None, seconds: float, best: Path | None) -> None:
    """Print a row for each case, and write it to ``out``."""
    until = time.monotonic() + seconds
    speed = read_speed()
    print(f"reads {speed:.2f} TB/s, {torch.cuda.get_device_name()}", flush=True)
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, (os.cpu_count() or 2) - 1))) as pool:
        first: list[Job] = [(form, name, tokens, {}) for form, tokens, name in itertools.product(TIMED, TOKENS, SHAPES)]
        first += [(form, "gate_up", tokens, {}) for form, tokens in itertools.product(BRIEFLY, (1, 64))]
        made = pool.map_async(compile_one, first, 2)
        checks = [pool.map_async(check, FORMS, 1), pool.map_async(check_experts, EXPERTS, 1)]
        tried: list[Job] = [
            (form, "o", tokens, change) for form, counts in SWEPT.items() for tokens in counts
            for change in changes(tokens) if seconds
        ]  # fmt: skip
        others = pool.map_async(compile_one, tried, 2)
        print(*filter(None, made.get()), sep="\n", flush=True)
        results = [result for each in checks for result in each.get()]
        print(*(line for line, _ in results), sep="\n", flush=True)
        answers = zip(tried, others.get(), strict=True)
        errors = {str((form, tokens, change)): error for (form, _, tokens, change), error in answers if error}
        print(*list(errors.values())[:5], sep="\n", flush=True)
    print(f"{time.monotonic() - until + seconds:.0f} s", flush=True)
    for form, name in itertools.product(TIMED, SHAPES):
        _time(form, name, TOKENS, speed, out)
    if seconds:
        sweep(until, best, out, errors)
    for form in BRIEFLY:
        _time(form, "gate_up", (1, 64), speed, out)
    if any(off for _, off in results):
        raise SystemExit("a format is WRONG, see above")


def _time(form: str, name: str, counts: Sequence[int], speed: float, out: Path | None) -> None:
    weights, sizes = _weights(form, *SHAPES[name]), _tuning()
    for tokens in counts:
        x = torch.randn(tokens, SHAPES[name][1], device=CUDA, dtype=torch.bfloat16)
        used = weights if tokens <= 64 else weights[:4]
        us = microseconds([partial(few_tokens_linear, sizes, torch.bfloat16, x, w) for w in used], 10)
        row = {"weight": name, "form": form, "tokens": tokens, "us": round(us, 2)}
        report({**row, "floor": round(_bytes(weights[0]) / speed / 1e6 / us, 3), "read_tb_s": round(speed, 2)}, out)
    if name == "gate_up":
        us = microseconds([partial(dequantized, sizes, w, torch.bfloat16) for w in weights[:4]], 5)
        report({"weight": name, "form": form, "copy_us": round(us, 2)}, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--sweep", type=float, default=0, metavar="SECONDS", help="stop other sizes after so long")
    parser.add_argument("--best", type=Path, help="where the fastest sizes go")
    given = parser.parse_args()
    main(given.file, given.sweep, given.best)
