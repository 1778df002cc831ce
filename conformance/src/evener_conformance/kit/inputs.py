"""Inputs as a layer may give them: parts of wider tensors, with other memory around them."""

from __future__ import annotations

import math

import torch


def strided_rows(value: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of wider rows, which is not contiguous and starts at an odd address."""
    wide = value.new_zeros(*value.shape[:-1], value.shape[-1] + 5) if value.dim() == 2 else None
    if wide is not None:
        part = wide[:, 3 : 3 + value.shape[1]]
    else:
        size = math.prod(value.shape[1:])
        flat = value.new_zeros(value.shape[0], size + 5)
        part = flat[:, 3 : 3 + size].unflatten(1, value.shape[1:])
    part.copy_(value)
    return part


def followed_by_nan(value: torch.Tensor, real: int) -> torch.Tensor:
    """The same values in new memory, with NaN in place of rows from ``real``, which only pad a step, and behind the
    last: a kernel that reads on there must not use it."""
    flat = value.new_full((value.numel() + 512,), torch.nan)
    flat[: value[:real].numel()] = value[:real].flatten()
    return flat[: value.numel()].view(value.shape)
