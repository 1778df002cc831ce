"""Time linear layers over weights of 8 bits beside plain ones, with Triton's kernels, on a GPU.

    python benchmarks/stored_products.py [FILE]

Each row: microseconds of one product in a captured graph, and the share of the time that reading the weight takes at
the card's read speed, which is measured first. Weights alternate, so that none is in the cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evener.contracts.quant import QuantFormat, WeightPart
from evener_kernels_triton.linear import Matrix, dequantized_linear, few_tokens_linear, library_linear
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Tuning

#: [rows, columns] of Qwen3-8B's layers.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FORMS = {
    "fp8": QuantFormat("float8_e4m3fn", 0, 1, scale="float32"),
    "fp8-block": QuantFormat("float8_e4m3fn", 128, 128, scale="float32"),
    "int8": QuantFormat("int8", 0, 1, scale="float32"),
}
TOKENS = (1, 2, 16, 64, 256, 512, 2048)
#: Bytes that the alternating weights have together, more than any cache.
APART = 512 << 20
CUDA = torch.device("cuda")


def tuning() -> Tuning:
    """Launch sizes of this card."""
    found: Any = torch.cuda.get_device_properties(0)  # torch's types do not know all fields
    shared, able = found.shared_memory_per_block_optin, torch.cuda.get_device_capability() >= (8, 9)
    return Tuning(found.multi_processor_count, shared, True, warpgroups=True, ptx=True, float8=able)


def made(form: str, rows: int, columns: int, seed: int) -> tuple[Matrix, torch.Tensor]:
    """A weight, and its values in bfloat16."""
    draw = torch.Generator(CUDA).manual_seed(seed)
    noise = torch.randn(rows, columns, generator=draw, device=CUDA)
    if form == "plain":
        return noise.to(torch.bfloat16), noise.to(torch.bfloat16)
    how = FORMS[form]
    stored = (noise * 32).clamp(-127, 127).to(torch.int8) if form == "int8" else noise.to(torch.float8_e4m3fn)
    high, wide = how.group_out, how.group or columns
    scale = torch.rand(-(-rows // high), -(-columns // wide), generator=draw, device=CUDA) + 0.5
    part = WeightPart("w", rows, columns, how, {"weight": stored, "scale": scale})
    spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return STORED.pack([part], "bfloat16", CUDA).data, stored.float() * spread


def microseconds(calls: list[Callable[[], object]], rounds: int = 20) -> float:
    """Of one call, in a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    best = float("inf")
    for _ in range(3):
        begin.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / rounds / len(calls))
    return best


def main(out: Path | None) -> None:
    """Print a row for each case, and write it to ``out``."""
    block = torch.empty(APART * 8, dtype=torch.uint8, device=CUDA).view(torch.int64)
    speed = APART * 8 / microseconds([lambda: block.max()], 5) / 1e6
    print(f"reads {speed:.2f} TB/s", flush=True)
    sizes = tuning()
    for name, (rows, columns) in SHAPES.items():
        for form in ("plain", *FORMS):
            one, values = made(form, rows, columns, 0)
            nbytes = rows * columns * (2 if form == "plain" else 1)
            others = [made(form, rows, columns, seed)[0] for seed in range(1, max(2, APART // nbytes))]
            for tokens in TOKENS:
                x = torch.randn(tokens, columns, device=CUDA, dtype=torch.bfloat16)
                own = sizes.uses_own_product(tokens, rows, form != "plain")

                def run(w: Matrix, x: torch.Tensor = x, own: bool = own) -> torch.Tensor:
                    if own:
                        return few_tokens_linear(sizes, torch.bfloat16, x, w)
                    if isinstance(w, torch.Tensor):
                        return library_linear(torch.bfloat16, x, w)
                    return dequantized_linear(sizes, torch.bfloat16, x, w)

                want = x.float() @ values.float().T
                off = float((run(one).float() - want).norm() / want.norm())
                assert off < 1e-2, f"{name} {form} {tokens}: {off}"
                used = [one, *others] if tokens <= 64 else [one, *others[:3]]
                us = microseconds([partial(run, w) for w in used])
                floor = nbytes / speed / 1e6
                row = {"weight": name, "form": form, "tokens": tokens, "us": round(us, 2)}
                row |= {"floor": round(floor / us, 3), "off": round(off, 5), "read_tb_s": round(speed, 2)}
                print(json.dumps(row), flush=True)
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")
            del one, values, others
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
