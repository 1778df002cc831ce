"""Numbers to GGUF's blocks of 256 ("k-quants"): q4_k, q5_k, q6_k.

A block has sub-blocks (8 of 32 in q4_k and q5_k, 16 of 16 in q6_k) with a scale each; q4_k and q5_k have a minimum
each too. These are themselves stored as small integers, times one float16 scale for the block. The layouts are those of
ggml's ``block_q4_K``, ``block_q5_K`` and ``block_q6_K``.

How scales are found: several candidates of a sub-block's scale are tried, the codes are rounded with each, and for
these codes the scale (and minimum) with the least square error has a closed form; the best candidate is kept. Then the
scales are rounded to their integers and the codes are rounded once more with what will really be read. Errors are not
weighted, so the root mean square error is minimized.

All functions take float32 [blocks, 256] and return uint8 [blocks, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

#: How much a candidate's range is larger than the numbers' own, in steps of the code: in q4_k and q5_k, and in q6_k.
_RANGES = (-0.9, -0.6, -0.4, -0.2, 0.0, 0.2, 0.5, 0.8)
_SYMMETRIC_RANGES = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)


def q4_k(x: torch.Tensor) -> torch.Tensor:
    """Two float16, 8 scales and 8 minima of 6 bits in 12 bytes, 256 numbers of 4 bits."""
    head, q = _with_minima(x, 15)
    low, high = q.view(-1, 4, 2, 32).unbind(2)
    return torch.cat((head, (low | (high << 4)).flatten(1)), 1)


def q5_k(x: torch.Tensor) -> torch.Tensor:
    """As q4_k, with the fifth bits of all numbers before the other four: bit i of a byte is sub-block i's."""
    head, q = _with_minima(x, 31)
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)[:, None]
    fifth = ((q >> 4) << shifts).sum(1, dtype=torch.uint8)
    low, high = (q & 15).view(-1, 4, 2, 32).unbind(2)
    return torch.cat((head, fifth, (low | (high << 4)).flatten(1)), 1)


def q6_k(x: torch.Tensor) -> torch.Tensor:
    """The low four bits of 256 numbers (offset by 32), their high two bits, 16 int8 scales, a float16."""
    x = x.view(-1, 16, 16)
    scale = _best_scale(x, 32)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = (largest / -128).half().float()
    scales = (scale * _inverse(d)).round().clamp(-128, 127)
    q = ((x * _inverse(d * scales)[..., None]).round().clamp(-32, 31) + 32).to(torch.uint8)
    # Two halves of 128 numbers, each in four rows of 32.
    a, b, c, e = q.view(-1, 2, 4, 32).unbind(2)
    low = torch.stack(((a & 15) | (c & 15) << 4, (b & 15) | (e & 15) << 4), 2)
    high = (a >> 4) | (b >> 4) << 2 | (c >> 4) << 4 | (e >> 4) << 6
    parts = (low.flatten(1), high.flatten(1), scales.to(torch.int8).view(torch.uint8), d.half().view(torch.uint8))
    return torch.cat(parts, 1)


#: By the storage of their formats.
K_TYPES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"q4_k": q4_k, "q5_k": q5_k, "q6_k": q6_k}


def _with_minima(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales as stored, uint8 [blocks, 16], and the codes, uint8 [blocks, 8, 32]."""
    x = x.view(-1, 8, 32)
    scale, minimum = _best_scale_and_minimum(x, most)
    d, low = ((t.amax(1, keepdim=True) / 63).half().float() for t in (scale, minimum))
    scales = (scale * _inverse(d)).round().clamp(0, 63)
    minima = (minimum * _inverse(low)).round().clamp(0, 63)
    q = ((x + (low * minima)[..., None]) * _inverse(d * scales)[..., None]).round().clamp(0, most).to(torch.uint8)
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return torch.cat((d.half().view(torch.uint8), low.half().view(torch.uint8), first, second, third), 1), q


def _best_scale_and_minimum(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of the last axis a scale s and a minimum m, both at least 0, so that codes c from 0 to ``most`` give
    c * s - m with a small square error."""
    count = x.shape[-1]
    low = x.amin(-1, keepdim=True).clamp(max=0)
    span = x.amax(-1, keepdim=True) - low
    total, squares = x.sum(-1), (x * x).sum(-1)
    best = torch.full_like(total, torch.inf)
    scale, minimum = torch.zeros_like(total), torch.zeros_like(total)
    shifted, inverse = x - low, _inverse(span)
    for extra in _RANGES:
        codes = (shifted * (inverse * (most + extra))).round_().clamp_(0, most)
        c1, c2, cx = codes.sum(-1), (codes * codes).sum(-1), (codes * x).sum(-1)
        # Least squares of x over c * s - m.
        det = count * c2 - c1 * c1
        s = (count * cx - c1 * total) * _inverse(det)
        m = (c1 * cx - c2 * total) * _inverse(det)
        # A minimum above zero cannot be stored; then the best scale without one.
        alone = (m < 0) | (det <= 0)
        s, m = torch.where(alone, cx * _inverse(c2), s).clamp_(min=0), m.masked_fill_(alone, 0)
        error = squares + s * s * c2 + count * m * m - 2 * (s * cx - m * total + s * m * c1)
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, s, scale), torch.where(better, m, minimum)
    return scale, minimum


def _best_scale(x: torch.Tensor, half: int) -> torch.Tensor:
    """Of each row of the last axis a scale of either sign, so that codes from ``-half`` to ``half - 1`` times it give a
    small square error."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    squares, inverse = (x * x).sum(-1), _inverse(largest)
    best, scale = torch.full_like(squares, torch.inf), torch.zeros_like(squares)
    for extra in _SYMMETRIC_RANGES:
        codes = (x * (inverse * -(half + extra))).round_().clamp_(-half, half - 1)
        c2, cx = (codes * codes).sum(-1), (codes * x).sum(-1)
        s = cx * _inverse(c2)
        error = squares - s * cx
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, s, scale)
    return scale


def _inverse(d: torch.Tensor) -> torch.Tensor:
    """1 / d; 0 where that is no number."""
    inverse = 1 / d
    return inverse.masked_fill(inverse.isinf(), 0)
