"""Numbers to GGUF's blocks of 32: q4_0, q4_1, q5_0, q5_1, q8_0. The results have the same bits as ggml's own.

All functions take float32 [blocks, 32] and return uint8 [blocks, bytes of a block]. They compute what ggml's reference
functions compute, in the same order of float32 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """A float16 scale and 32 int8."""
    d = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(d)
    # Halves are rounded away from zero, as in C; torch rounds them to even numbers.
    size = scaled.abs()
    whole = size.floor()
    q = (whole + (2 * (size - whole)).floor()) * scaled.sign()
    return torch.cat((_half(d), q.to(torch.int8).view(torch.uint8)), 1)


def q4_0(x: torch.Tensor) -> torch.Tensor:
    """A float16 scale and 32 numbers of 4 bits, offset by 8."""
    d, q = _symmetric(x, 8)
    return torch.cat((_half(d), _nibbles(q)), 1)


def q4_1(x: torch.Tensor) -> torch.Tensor:
    """A float16 scale, a float16 minimum, and 32 numbers of 4 bits."""
    d, low, q = _with_minimum(x, 15)
    return torch.cat((_half(d), _half(low), _nibbles(q)), 1)


def q5_0(x: torch.Tensor) -> torch.Tensor:
    """A float16 scale, the fifth bits, and the other four bits of 32 numbers, offset by 16."""
    d, q = _symmetric(x, 16)
    return torch.cat((_half(d), _fifth_bits(q), _nibbles(q & 15)), 1)


def q5_1(x: torch.Tensor) -> torch.Tensor:
    """A float16 scale, a float16 minimum, the fifth bits, and the other four bits of 32 numbers."""
    d, low, q = _with_minimum(x, 31)
    return torch.cat((_half(d), _half(low), _fifth_bits(q), _nibbles(q & 15)), 1)


#: By the storage of their formats.
BLOCK_TYPES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q4_0": q4_0, "q4_1": q4_1, "q5_0": q5_0, "q5_1": q5_1, "q8_0": q8_0,
}  # fmt: skip


def _symmetric(x: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes; the number of the largest size becomes the code 0, which is ``-half`` times the scale."""
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    d = largest / -half
    q = (x * _inverse(d) + (half + 0.5)).trunc().clamp(0, 2 * half - 1)
    return d, q.to(torch.uint8)


def _with_minimum(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low = x.amin(1, keepdim=True)
    d = (x.amax(1, keepdim=True) - low) / most
    q = ((x - low) * _inverse(d) + 0.5).trunc().clamp(0, most)
    return d, low, q.to(torch.uint8)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    """1 / d; 0 where that is no number."""
    inverse = 1 / d
    return inverse.masked_fill(inverse.isinf(), 0)


def _half(d: torch.Tensor) -> torch.Tensor:
    return d.half().view(torch.uint8)


def _nibbles(q: torch.Tensor) -> torch.Tensor:
    """Number i in the low half of byte i, number i + 16 in the high half."""
    return q[:, :16] | (q[:, 16:] << 4)


def _fifth_bits(q: torch.Tensor) -> torch.Tensor:
    """Four bytes; bit i of the 32 is that of number i."""
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=q.device)
    return ((q >> 4).view(-1, 4, 8) * weights).sum(2, dtype=torch.uint8)
