"""The numbers of GGUF's blocks, in torch, for the formats in which files store embeddings: two to four times as fast as
the library ``gguf``, which is asked for the others. The layouts are those of ggml-common.h, and the products are taken
in the library's order, so the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """int8 [blocks, 32] of bytes [blocks, 16]: the low halves, then the high ones."""
    numbers = torch.empty(len(stored), 32, dtype=torch.uint8)
    numbers[:, :16] = stored & 15
    numbers[:, 16:] = stored >> 4
    return numbers.view(torch.int8)


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """int8 [blocks, 32] of 32 bits in bytes [blocks, 4], the lowest first: 16 where one is set, else 0."""
    bits = (torch.arange(256, dtype=torch.int32)[:, None] >> torch.arange(8, dtype=torch.int32)) & 1
    return (16 * bits).to(torch.int8).index_select(0, stored.reshape(-1).int()).view(-1, 32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return (_half(blocks, 0) * _nibbles(blocks[:, 4:])).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks[:, 2:6])).sub_(16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks[:, 4:8]))
    return (_half(blocks, 0) * numbers).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # six bits of 8 scales and of 8 least numbers
    scales = torch.cat([low & 63, high & 15 | low >> 2 & 48], 1)
    least = torch.cat([middle & 63, high >> 4 | middle >> 2 & 48], 1)
    stored = blocks[:, 16:].view(-1, 4, 32)
    numbers = torch.empty(len(blocks), 4, 2, 32, dtype=torch.uint8)
    numbers[:, :, 0] = stored & 15
    numbers[:, :, 1] = stored >> 4
    made = (_half(blocks, 0) * scales)[..., None] * numbers.view(-1, 8, 32)
    return made.sub_((_half(blocks, 2) * least)[..., None]).view(-1, 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[:, :128].view(-1, 2, 2, 32), blocks[:, 128:192].view(-1, 2, 32)
    numbers = torch.empty(len(blocks), 2, 4, 32, dtype=torch.uint8)
    numbers[:, :, :2] = low & 15
    numbers[:, :, 2:] = low >> 4
    for part in range(4):
        numbers[:, :, part] |= (high >> 2 * part & 3) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return (scales[..., None] * numbers.view(torch.int8).sub_(32).view(-1, 16, 16)).view(-1, 256)


#: Numbers that are made at a time.
_SLICE = 1 << 20


def numbers(stored: torch.Tensor, storage: str, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A matrix [rows, columns] in ``dtype``.

    Args:
        stored: uint8 [rows, bytes of a row], in the format ``storage``.
        block: elements and bytes of a block.
    """
    (elements, nbytes), make = block, BLOCK_NUMBERS.get(storage) or _by_library(storage)
    rows, columns = len(stored), stored.shape[1] // nbytes * elements
    out = torch.empty(rows, columns, dtype=dtype)
    # A slice after another: what lies between stays in the processor's cache.
    step = max(1, _SLICE // max(1, columns))
    for at in range(0, rows, step):
        some = stored[at : at + step]
        out[at : at + step] = make(some.reshape(-1, nbytes)).view(len(some), columns)
    return out


def _by_library(storage: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """As ``BLOCK_NUMBERS``, by the library ``gguf``."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[storage.upper()]
    return lambda blocks: torch.from_numpy(np.ascontiguousarray(dequantize(blocks.numpy(), kind)))


#: By format: makes float32 [blocks, elements of a block] of uint8 [blocks, bytes of a block].
BLOCK_NUMBERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k, "q6_k": _q6_k,
}  # fmt: skip
