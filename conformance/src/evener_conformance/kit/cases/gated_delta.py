"""Test cases of hybrid models' primitives; see ``basic``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.ops import OpCase
from evener_conformance.kit.cases.basic import EPS, InputFactory


def delta_gates(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One row, many, none; large arguments."""
    make = InputFactory(dtype, generator)
    for tokens, heads, scale in ((1, 1, 1.0), (9, 6, 1.0), (5, 3, 30.0), (0, 4, 1.0)):
        numbers = [make.noise(heads, dtype="float32") for _ in range(2)]
        rows = [make.noise(tokens, heads, scale=scale) for _ in range(2)]
        yield OpCase({"heads": heads, "dtype": dtype}, (*rows, *numbers))


def gated_rms_norm(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Heads of any width, rows of zeros."""
    make = InputFactory(dtype, generator)
    for shape in ((1, 1, 64), (7, 3, 10), (4, 37)):
        x = make.noise(*shape, scale=3.0)
        x[-1] = 0
        weight = make.noise(shape[-1], scale=0.2, shift=1.0)
        yield OpCase({"hidden": shape[-1], "dtype": dtype, "eps": EPS}, (x, make.noise(*shape), weight))
