"""Quantized state by its definition: which numbers a provider keeps of those that it is given."""

from __future__ import annotations

import torch

from evener.contracts.state import StateSpec

#: The largest element of each type.
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def scales_of(spec: StateSpec) -> list[torch.Tensor]:
    """Scales for numbers that are about normal, for each tensor [heads]: another one for keys and for values, and for
    each head. The largest keys, and values of the first head, are cut off. Empty if the state is not quantized."""
    found = []
    for number, tensor in enumerate(spec.tensors):
        if tensor.wide is not None:
            heads = torch.arange(tensor.shape[0], dtype=torch.float32)
            found.append((1.7 + number) * (1 + 0.4 * heads) / _LARGEST[tensor.dtype])
    return found


def held(values: torch.Tensor, spec: StateSpec, number: int) -> torch.Tensor:
    """What a provider keeps of ``values`` [tokens, heads, dim] of tensor ``number``: themselves, or of quantized state
    in float32 the numbers that its elements stand for."""
    tensor = spec.tensors[number]
    if tensor.wide is None:
        return values
    scale, limit = scales_of(spec)[number][:, None], _LARGEST[tensor.dtype]
    divided = torch.minimum(torch.maximum(values.float() / scale, torch.tensor(-limit)), torch.tensor(limit))
    elements = divided.round() if tensor.dtype == "int8" else divided.to(getattr(torch, tensor.dtype)).float()
    return elements * scale
