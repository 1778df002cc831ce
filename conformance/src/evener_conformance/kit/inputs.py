"""Inputs as a layer may give them: parts of wider tensors, with other memory around them."""

from __future__ import annotations

import math

import torch

from evener_conformance.kit.guards import GuardedMemory, poison


def strided_rows(value: torch.Tensor, memory: GuardedMemory, name: str) -> torch.Tensor:
    """The same values as a slice of wider rows, which is not contiguous and starts at an odd address. NaN lies between
    the rows."""
    size = math.prod(value.shape[1:])
    wide = poison(value.new_empty(value.shape[0], size + 5))
    wide[:, 3 : 3 + size].copy_(value.flatten(1))
    part: torch.Tensor = memory.copy(wide, name, flush=True)[:, 3 : 3 + size].unflatten(1, value.shape[1:])
    return part


def followed_by_nan(value: torch.Tensor, real: int, memory: GuardedMemory, name: str) -> torch.Tensor:
    """The same values in new memory, with NaN in place of rows from ``real``, which only pad a step."""
    made = memory.copy(value, name)
    made[real:] = torch.nan
    return made
