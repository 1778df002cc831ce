"""The elements of quantized state: numbers divided by a scale, in eight bits. This is their meaning; kernels equal it.

A tensor [..., heads, dim] has one float32 scale for each head. An element is ``round(x / scale)``, to the nearest
element with ties to even, and saturated: what is too large becomes the largest element, never infinity or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evener.contracts.quantized.state import QuantizedState
from evener.contracts.state import StateSpec

#: Element types, and the largest number of each.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [..., heads, dim] as elements of ``dtype``. NaN stays NaN; it is 0 in int8, which has none.

    Args:
        scale: float32 [heads], positive.
    """
    largest = LARGEST[str(dtype).removeprefix("torch.")]
    divided = (x.float() / scale[:, None]).clamp(-largest, largest)
    return divided.nan_to_num().round().to(dtype) if dtype is torch.int8 else divided.to(dtype)


def dequantize(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers [..., heads, dim] of ``elements``, in float32."""
    return elements.float() * scale[:, None]


class ScaledPages:
    """Pages [blocks, block_size, heads, dim] of elements that are read and written as numbers.

    Attributes:
        elements: as stored.
        scale: float32 [heads].
        dtype: of the numbers that ``[...]`` takes and gives.
    """

    def __init__(self, elements: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.elements, self.scale, self.dtype = elements, scale, dtype
        self.shape = elements.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Numbers in float32: rounding them to ``dtype`` would change a result."""
        return dequantize(self.elements[index], self.scale)

    def __setitem__(self, index: Any, values: torch.Tensor) -> None:
        self.elements[index] = quantize(values, self.scale, self.elements.dtype)


class QuantizedPages(QuantizedState):
    """Makes quantized state of a provider whose ``bind`` returns tensors [blocks, block_size, heads, dim], which it
    reads and writes by index."""

    scaled = frozenset(LARGEST)

    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> Any:
        parts = zip(self.bind(storage, spec, block_size), scales, spec.tensors, strict=True)
        return tuple(ScaledPages(part, scale, getattr(torch, str(tensor.wide))) for part, scale, tensor in parts)
