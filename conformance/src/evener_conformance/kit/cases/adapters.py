"""Test cases of adding adapters; see ``basic``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.ops import OpCase
from evener_conformance.kit.cases.basic import InputFactory


def add_adapters(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One place and many, of which some are not used and some hold zeros beyond their adapter's rank; one part and
    several of unequal sizes; rows without an adapter, alone and between others; deep and wide; no rows; an adapter that
    is infinite and that no row has."""
    make = InputFactory(dtype, generator)
    for tokens, parts, columns, rank, slots in (
        (1, (64,), 64, 16, 1), (3, (90, 30, 30), 60, 8, 2), (17, (33,), 40, 16, 4), (5, (88, 88), 37, 3, 3),
        (2, (7,), 576, 1, 9), (0, (16,), 16, 8, 2), (40, (48, 16, 16), 64, 32, 5), (2, (128,), 4352, 16, 2),
        (2, (8448,), 128, 16, 2), (6, (31,), 48, 64, 3),
    ):  # fmt: skip
        rows = sum(parts)
        static = {"columns": columns, "rows": rows, "parts": parts, "slots": slots, "rank": rank,
                  "inner": len(parts) * rank, "dtype": dtype}  # fmt: skip
        down = make.noise(slots, len(parts), rank, columns, scale=columns**-0.5)
        up = make.noise(slots, rows, rank, scale=rank**-0.5)
        down[-1, :, rank // 2 :], up[-1, :, rank // 2 :] = 0, 0
        index = make.ids(slots + 1, tokens) - 1
        index[1:2] = -1
        matrices = down.flatten(1, 2), up
        yield OpCase(static, (make.noise(tokens, rows), make.noise(tokens, columns), *matrices, index))
    down[-1], up[-1] = torch.inf, torch.inf
    for owners in ([-1, -1, -1, -1], [0, -1, 1, 0]):
        index = torch.tensor(owners, dtype=torch.int32)
        yield OpCase(static, (make.noise(4, rows), make.noise(4, columns), down.flatten(1, 2), up, index))
