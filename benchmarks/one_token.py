"""Time the products of one decoder layer for one token on a GPU, by how their weights are stored.

    python benchmarks/one_token.py [--forms plain,fp8,int4] [--sweep] [FILE]

The four products of a layer of Qwen3-8B with their norms and activation (no attention) are chained, and several layers
are captured in a graph, so that no weight is in the cache. Each row: microseconds a layer, and what reading takes at
the card's read speed, which is measured first. Packed weights are also timed with their norms and activation in
launches of their own ("apart"), and their results compared with those. ``--sweep``: other sizes of each product.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packed_products import FORMS as PACKED_FORMS
from packed_products import part_of, read_speed
from stored_products import CUDA, microseconds, tuning
from stored_products import FORMS as STORED_FORMS

from evener.contracts.declared import LinearWeight
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import Packing, QuantFormat, WeightPart
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.composites import enter_rows
from evener_kernels_triton.linear import project_rows
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Product, Tuning

#: [rows, columns] of the products of Qwen3-8B's layers, in their order; the first and the third begin with a norm.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FORMS = ("plain", "fp8", "fp8-block", "int4", "int4-zeros", "q4_k", "mxfp4", "nvfp4", "nf4")
LAYERS = 6
#: A layer: from x and the residual stream to the same.
Layer = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Apart(Tuning):
    """Packed weights as with many tokens: no norm and no activation in the product."""

    def packed_token(self, rows: int, columns: int, halves: int, group: int, table: bool = False) -> Product | None:
        """No sizes."""
        return None


def weight(form: str, rows: int, columns: int, seed: int) -> tuple[LinearWeight, Any]:
    """A weight's declaration, and what its packing made."""
    packing: Packing = PACKED
    if form in PACKED_FORMS:
        part = part_of(form, rows, columns, seed)
    else:
        draw = torch.Generator(CUDA).manual_seed(seed)
        numbers = torch.randn(rows, columns, generator=draw, device=CUDA) * 0.02
        how = QuantFormat("bfloat16") if form == "plain" else STORED_FORMS[form]
        if form == "plain":
            tensors, packing = {"weight": numbers.to(torch.bfloat16)}, PLAIN
        else:
            shape = -(-rows // how.group_out), -(-columns // (how.group or columns))
            scale = torch.rand(shape, generator=draw, device=CUDA) * 0.01 + 0.01
            tensors, packing = {"weight": (numbers * 50).to(torch.float8_e4m3fn), "scale": scale}, STORED
        part = WeightPart("w", rows, columns, how, tensors)
    declared = LinearWeight("w", (part,), rows, columns, "bfloat16")
    declared.layout = packing.layout
    return declared, packing.pack([part], "bfloat16", CUDA).data


def layers(form: str, sizes: Tuning, count: int) -> Iterator[tuple[Layer, int]]:
    """Layers of random weights, and their bytes."""
    capabilities = DeviceCapabilities(dtypes=frozenset({"bfloat16"}))
    static = {"eps": 1e-6, "offset": 0.0, "dtype": "bfloat16", "hidden": 4096}
    call = OpCall("mlp_block", static, Bucket(1, 1), capabilities)
    noise = torch.rand(4096, device=CUDA, generator=torch.Generator(CUDA).manual_seed(7))
    gain = noise.to(torch.bfloat16) + 0.5
    for seed in range(count):
        (qkv_as, qkv), (o_as, o), (up_as, up), (down_as, down) = (
            weight(form, *shape, seed + 100 * i) for i, shape in enumerate(SHAPES.values())
        )
        first, second = enter_rows(sizes, call, qkv_as), enter_rows(sizes, call, up_as, "silu")
        out, last = (project_rows(sizes, call, torch.bfloat16, one) for one in (o_as, down_as))

        def layer(
            x: torch.Tensor, residual: torch.Tensor, first: Any = first, second: Any = second, out: Any = out,
            last: Any = last, weights: tuple[Any, ...] = (qkv, o, up, down),
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            wide, residual = first(x, residual, gain, weights[0], None)
            x = out(wide[:, :4096], weights[1], None)
            inside, residual = second(x, residual, gain, weights[2], None)
            return last(inside, weights[3], None), residual

        yield layer, sum(nbytes(one) for one in (qkv, o, up, down))


def nbytes(data: Any) -> int:
    """Bytes of a matrix in any layout."""
    if isinstance(data, torch.Tensor):
        return data.nbytes
    if hasattr(data, "segments"):
        return sum(tensor.nbytes for segment in data.segments for tensor in segment.tensors())
    return int(data.elements.nbytes + data.scales.nbytes)


def chained(stack: Sequence[Layer], x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers after each other."""
    for layer in stack:
        x, residual = layer(x, residual)
    return x, residual


def main(forms: Sequence[str], out: Path | None) -> None:
    """A row for each form."""
    speed = read_speed()
    card = torch.cuda.get_device_name()
    print(f"reads {speed:.2f} TB/s, {card}", flush=True)
    own = tuning()
    for form in forms:
        results = {}
        for name, sizes in (("one launch", own), ("apart", Apart(**vars_of(own)))):
            if name == "apart" and form not in PACKED_FORMS:
                continue
            made = list(layers(form, sizes, LAYERS))
            stack, held = [layer for layer, _ in made], made[0][1]
            draw = torch.Generator(CUDA).manual_seed(1)
            x = torch.randn(1, 4096, device=CUDA, generator=draw).to(torch.bfloat16)
            residual = torch.randn(1, 4096, device=CUDA, generator=draw)
            results[name] = chained(stack[:1], x, residual)
            us = microseconds([partial(chained, stack, x, residual)], 50) / LAYERS
            row = {"model": "qwen3-8b", "part": "layer", "form": form, "launches": name, "us": round(us, 2)}
            row |= {"floor_us": round(held / speed / 1e6, 2), "read_tb_s": round(speed, 2), "device": card}
            print(json.dumps(row), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        if len(results) == 2:
            (y, stream), (want, before) = results.values()
            off = float((y.float() - want.float()).norm() / want.float().norm())
            print(f"{form}: results differ by {off:.1e}, streams by {float((stream - before).norm()):.1e}", flush=True)
            assert off < 2e-2 and torch.isfinite(y).all(), form


def vars_of(sizes: Tuning) -> dict[str, Any]:
    """The arguments that made it."""
    return {name: value for name, value in vars(sizes).items() if name != "answers"}


def changes(name: str) -> Iterator[dict[str, int]]:
    """Sizes of one product to try: rows at a time, warps, programs for each unit."""
    warps = (4, 8, 16) if name == "down" else (2, 4, 8)
    for each, n in itertools.product(warps, {"gate_up": (2, 4, 8), "down": (2, 4, 8)}.get(name, (4, 8, 16, 32))):
        for resident in (4, 8, 16, 24):
            if resident >= each:
                yield {"n": n, "warps": each, "m": resident // each}


def product(form: str, name: str, change: dict[str, int], count: int) -> list[Callable[[], Any]]:
    """Calls of one product with these sizes, each of another weight."""
    capabilities = DeviceCapabilities(dtypes=frozenset({"bfloat16"}))
    static = {"eps": 1e-6, "offset": 0.0, "dtype": "bfloat16", "hidden": 4096}
    call, columns = OpCall("mlp_block", static, Bucket(1, 1), capabilities), SHAPES[name][1]
    sizes = tuning().with_changes(change)
    x = torch.randn(1, columns, device=CUDA).to(torch.bfloat16)
    residual, gain = torch.randn(1, columns, device=CUDA), torch.rand(columns, device=CUDA).to(torch.bfloat16)
    made = [weights(form, name, seed) for seed in range(count)]
    declared = made[0][0]
    if name in ("qkv", "gate_up"):
        enter = enter_rows(sizes, call, declared, "silu" if name == "gate_up" else "")
        return [partial(enter, x, residual, gain, data, None) for _, data in made]
    project = project_rows(sizes, call, torch.bfloat16, declared)
    return [partial(project, x, data, None) for _, data in made]


_WEIGHTS: dict[tuple[str, str, int], tuple[LinearWeight, Any]] = {}


def weights(form: str, name: str, seed: int) -> tuple[LinearWeight, Any]:
    """A weight that is made once."""
    if (form, name, seed) not in _WEIGHTS:
        _WEIGHTS[form, name, seed] = weight(form, *SHAPES[name], seed)
    return _WEIGHTS[form, name, seed]


def compile_one(job: tuple[str, str, dict[str, int]]) -> str:
    """Compile a kernel into the cache on disk; returns an error."""
    torch.set_num_threads(1)
    try:
        product(*job, 1)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # it is one of many
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def sweep(forms: Sequence[str]) -> None:
    """The fastest sizes of each product."""
    jobs = [(form, name, one) for form in forms for name in SHAPES for one in changes(name)]
    seen = {str((form, name, one["n"], one["warps"])): (form, name, one) for form, name, one in jobs}
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        print(*filter(None, pool.map(compile_one, list(seen.values()), 1)), sep="\n", flush=True)
    for form, name in itertools.product(forms, SHAPES):
        times = []
        for one in changes(name):
            try:
                times.append((microseconds(product(form, name, one, 4 if name == "gate_up" else 8), 20), one))
            except Exception as error:  # it is one of many
                print(form, name, one, str(error)[:200])
        times.sort(key=lambda of: of[0])
        print(form, name, *(f"{us:.2f} {one}" for us, one in times[:6]), sep="\n  ", flush=True)
        _WEIGHTS.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    asked = given.forms.split(",")
    main(asked, given.file)
    if given.sweep:
        swept = [form for form in asked if form in PACKED_FORMS]
        sweep(swept)
