"""Test cases of what ranks do together, on one rank whose peers have what it has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.ops import OpCase
from evener.testing.communicators import Mirror
from evener.testing.conformance.cases.basic import Maker


def all_reduce(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One, few, many and no rows, of even and odd width."""
    make = Maker(dtype, generator)
    for size, rows, hidden in ((2, 1, 64), (4, 5, 96), (2, 70, 37), (3, 0, 16)):
        yield OpCase({"communicator": Mirror(size), "hidden": hidden, "dtype": dtype}, (make.noise(rows, hidden),))


def all_gather(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Even shares, a last rank that has less, no rows."""
    make = Maker(dtype, generator)
    for size, rows, columns, total in ((2, 1, 32, 64), (3, 5, 11, 31), (4, 3, 8, 32), (2, 0, 4, 8)):
        static = {"communicator": Mirror(size), "columns": columns, "total": total, "dtype": dtype}
        yield OpCase(static, (make.noise(rows, columns),))
