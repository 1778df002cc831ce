"""Small unsigned integers that are packed into words of 32 bits, as GPTQ, AWQ and compressed-tensors store them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Bits of a number in GPTQ. Numbers of 3 bits run across words: 32 of them fill three.
BITS = (2, 3, 4, 8)
#: Bits of a number, and the widths of the planes that GPTQModel's format "gptq_p" divides it into, the lowest first.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def per_word(bits: int) -> Fraction:
    """Numbers in a word."""
    return Fraction(32, bits)


def least_count(bits: int) -> int:
    """The least count of numbers that fills whole words."""
    return per_word(bits).numerator


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of int32 words [..., n]: uint8 [..., 32 n / bits] or a little longer, if whole numbers do not fill
    the words. ``bits`` is 1 to 8. Number i has the bits from i x ``bits``, counted from the lowest bit of the first
    word."""
    import torch

    # Little-endian, like the files. Flat: a last axis of one word may have any stride.
    data = words.contiguous().reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], -1)
    if bits == 8:
        return data
    if bits in (2, 4):
        parts = [data >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(-2)
    # Eight numbers fill as many bytes as a number has bits. What is left over at the end is no number.
    data = torch.nn.functional.pad(data, (0, -data.shape[-1] % bits))
    parts = [part.int() if bits < 4 else part.long() for part in data.unflatten(-1, (-1, bits)).unbind(-1)]
    eight = sum((part << 8 * i for i, part in enumerate(parts[1:], 1)), parts[0])
    return torch.stack([(eight >> bits * i & (1 << bits) - 1).to(torch.uint8) for i in range(8)], dim=-1).flatten(-2)


def unpack_planes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of int32 words [..., n]: uint8 [..., 32 n / bits]. Each ``bits`` words have 32 numbers: first words
    with the lowest bits of all 32, then those with the next."""
    import torch

    runs, at = words.unflatten(-1, (-1, bits)), 0
    numbers = torch.zeros(*runs.shape[:-1], 32, dtype=torch.uint8, device=words.device)
    for width in PLANES[bits]:
        numbers |= unpack(runs[..., at : at + width], width) << at
        at += width
    return numbers.flatten(-2)


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The int32 words [..., n x ``bits`` / 32] of uint8 numbers [..., n], of which the lowest ``bits`` count: what
    ``unpack`` reads. ``n`` is a multiple of ``least_count``."""
    import torch

    numbers = numbers & ((1 << bits) - 1)
    if bits == 3:
        eight = numbers.unflatten(-1, (-1, 8)).int()
        joined = sum((eight[..., i] << 3 * i for i in range(1, 8)), eight[..., 0])
        data = torch.stack([joined >> shift & 255 for shift in (0, 8, 16)], dim=-1).to(torch.uint8).flatten(-2)
    else:
        parts = numbers.unflatten(-1, (-1, 8 // bits))
        data = parts[..., 0].clone()
        for i in range(1, 8 // bits):
            data |= parts[..., i] << bits * i
    return data.contiguous().view(torch.int32)


def pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, uint8 [..., n], as bytes [..., n / 2] with the even number in the low half."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4
