"""Test cases of latent attention's primitives; see ``basic``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.ops import OpCase
from evener_conformance.kit.cases.basic import LARGE_MATRICES, InputFactory


def head_linear(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One head and several, both orientations, matrices that are slices of larger ones and deep or wide, no rows."""
    make = InputFactory(dtype, generator)
    for tokens, heads, columns, rows, transposed in (
        (1, 1, 64, 40, False), (7, 3, 10, 33, True), (17, 5, 32, 16, False), (0, 2, 8, 8, True),
        *((2, 1, columns, rows, False) for rows, columns in LARGE_MATRICES),
        *((2, 1, columns, rows, True) for rows, columns in LARGE_MATRICES[:2]),
    ):  # fmt: skip
        shape = (columns, rows) if transposed else (rows, columns)
        weight = make.noise(heads, shape[0] + 3, shape[1], scale=columns**-0.5)[:, 3:]
        static = {"heads": heads, "columns": columns, "rows": rows, "transposed": transposed, "dtype": dtype}
        yield OpCase(static, (make.noise(tokens, heads, columns), weight))


def partial_attention(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """A whole prompt, the end of one, one query, and queries that come before the piece."""
    make = InputFactory(dtype, generator)
    for tokens, keys, heads, dim, value_dim, offset in (
        (9, 9, 2, 16, 16, 0), (4, 21, 3, 24, 10, 17), (1, 33, 5, 12, 8, 32), (6, 5, 1, 32, 32, -2), (3, 8, 2, 8, 8, 40),
    ):  # fmt: skip
        static = {"heads": heads, "scale": dim**-0.5, "dtype": dtype}
        key, value = make.noise(keys, heads, dim), make.noise(keys, heads, value_dim)
        yield OpCase(static, (make.noise(tokens, heads, dim), key, value, offset))
