"""Cases of ``linear`` and ``grouped_linear`` over weights in blocks, for kernels with a packing that takes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.ops import OpCase
from evener.contracts.quant import WeightPart, block_format, plain
from evener.layers.declared import LinearWeight, StackedWeight

#: A kernel may round activations to 16-bit integers that share a scale: at most 9e-5 of the two rows' lengths.
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (1.6e-2, 1e-2), "float16": (4e-3, 4e-3)}
_STORAGES = ("q8_0", "plain", "q4_1")


def numbers(part: WeightPart) -> torch.Tensor:
    """What a part of ``stored`` holds, in float32: Q8_0 is d q, Q4_1 is d q + m with low halves of bytes first."""
    blocks = part.tensors["weight"].unflatten(1, (part.columns // 32, -1))
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    if part.format.storage == "q8_0":
        values: torch.Tensor = scale * blocks[..., 2:].view(torch.int8).float()
        return values.flatten(1)
    least, quants = blocks[..., 2:4].contiguous().view(torch.float16).float(), blocks[..., 4:]
    values = scale * torch.cat((quants & 15, quants >> 4), -1).float() + least
    return values.flatten(1)


def stored(storage: str, rows: int, columns: int, dtype: str, generator: torch.Generator) -> WeightPart:
    """Random valid blocks, rows of about length 1; unquantized if ``storage`` is "plain"."""
    if storage == "plain":
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return WeightPart("part", rows, columns, plain(dtype), {"weight": values.to(getattr(torch, dtype))})
    halves, quants, size = (1, 32, 128.0) if storage == "q8_0" else (2, 16, 16.0)
    scales = torch.randn(rows, columns // 32, halves, generator=generator) * columns**-0.5 / size
    quanta = torch.randint(256, (rows, columns // 32, quants), generator=generator, dtype=torch.uint8)
    data = torch.cat((scales.half().view(torch.uint8), quanta), -1).flatten(1)
    return WeightPart("part", rows, columns, block_format(storage), {"weight": data})


def block_cases(op: str, dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Each format alone and parts of several in one matrix; nothing for other ops."""
    mixes = [[("q8_0", 33)], [("q4_1", 16)], [(storage, 9 + 8 * i) for i, storage in enumerate(_STORAGES)]]
    for mix in mixes if op in ("linear", "grouped_linear") else ():
        for tokens, columns in ((1, 64), (6, 96), (40, 320)):
            count = 3 if op == "grouped_linear" else 1
            matrices = [tuple(stored(s, n, columns, dtype, generator) for s, n in mix) for _ in range(count)]
            rows = sum(n for _, n in mix)
            bare = tuple(WeightPart(p.name, p.rows, p.columns, p.format) for p in matrices[0])
            sizes = {"columns": columns, "rows": rows, "dtype": dtype}
            x = torch.randn(tokens, columns, generator=generator).to(getattr(torch, dtype))
            bias = torch.randn(count, rows, generator=generator).to(getattr(torch, dtype))
            if op == "linear":
                weight = LinearWeight("weight", bare, rows, columns, dtype)
                yield OpCase({**sizes, "weight": weight, "out": dtype}, (x, matrices[0], bias[0]))
            else:
                weight = StackedWeight("stack", bare, rows, columns, dtype, experts=count)
                slots = torch.randint(-1, count, (tokens, 2), generator=generator, dtype=torch.int32)
                yield OpCase({**sizes, "weight": weight, "experts": count}, (x, tuple(matrices), slots, bias))
