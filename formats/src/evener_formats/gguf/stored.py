"""The bytes of one stored tensor as a torch tensor. Imports torch only when it is asked for one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evener.contracts.quant import BLOCKS, WeightPart, block_format, plain
from evener.contracts.quant import MXFP4 as FOUR_BITS
from evener_formats.gguf.header import MXFP4, TYPES, UNPACKED, GgufTensor

if TYPE_CHECKING:
    import torch

_BYTES = {name: (elements, nbytes) for name, elements, nbytes in TYPES.values()}


def memory_map(entry: GgufTensor) -> torch.Tensor:
    """The tensor in its file, which must not be written: in a float or integer dtype in its shape; in a format of
    ``BLOCKS`` or ``UNPACKED`` uint8 [..., bytes of a row]; in MXFP4 uint8 [..., blocks of a row, bytes of a block]."""
    import numpy as np
    import torch

    # Mode "c" (copy on write), because torch warns about arrays that are not writable.
    data = np.memmap(entry.file, dtype=np.uint8, mode="c", offset=entry.begin, shape=(entry.end - entry.begin,))
    flat, (elements, nbytes) = torch.from_numpy(data), _BYTES[entry.dtype]
    if entry.dtype == MXFP4:
        return flat.view(*entry.shape[:-1], entry.shape[-1] // elements, nbytes)
    if entry.dtype in BLOCKS or entry.dtype in UNPACKED:
        return flat.view(*(entry.shape[:-1] or (1,)), entry.shape[-1] // elements * nbytes)
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def folder_rows(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of a model folder, in which each head has the two halves of its rotation one after the other; a
    file has their rows in turns. 0 heads: the rows stay as they are."""
    return matrix.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(matrix.shape) if heads else matrix


def dequantized(entry: GgufTensor) -> torch.Tensor:
    """A matrix, or a stack of them, in float32."""
    import torch

    from evener_formats.gguf.block_numbers import numbers
    from evener_formats.gguf.scheme import GgufScheme

    rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
    stored = memory_map(entry).flatten(0, len(entry.shape) - 2)
    if entry.dtype in UNPACKED:
        return numbers(stored, entry.dtype, UNPACKED[entry.dtype], torch.float32).view(entry.shape)
    if entry.dtype == MXFP4:
        blocks, scales = split_mxfp4(stored)
        part = WeightPart("", rows, columns, FOUR_BITS, {"weight": blocks, "scale": scales})
    else:
        kind = block_format(entry.dtype) if entry.dtype in BLOCKS else plain(entry.dtype)
        part = WeightPart("", rows, columns, kind, {"weight": stored})
    return GgufScheme().dequantize(part, "float32").view(entry.shape)


def split_mxfp4(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales of blocks in MXFP4, as the scheme "mxfp4" has them.

    A stored block begins with its scale. Byte i of the other 16 has element i in its low half and element i + 16 in the
    high half (ggml's ``block_mxfp4``), where a model folder has two neighbours in a byte. ggml's table of elements is
    doubled and its scales are halved, so that the bits of both mean the same here as there; but a scale of 255 is NaN
    here, as in the specification, and 2^127 there.

    Args:
        stored: uint8 [..., 17].

    Returns:
        uint8 [..., 16], the even element of a pair in the low half of a byte; uint8 [...].
    """
    import torch

    # Two bytes at a time: their low halves are neighbours among the first 16 elements, their high halves among the
    # others.
    pairs = stored[..., 1:].clone(memory_format=torch.contiguous_format).view(torch.int16)
    blocks = torch.empty((*pairs.shape[:-1], 16), dtype=torch.uint8)
    for half, quarters in ((blocks[..., :8], pairs & 0x0F0F), (blocks[..., 8:], (pairs >> 4) & 0x0F0F)):
        quarters |= quarters >> 4
        half.copy_(quarters.view(torch.uint8)[..., ::2])
    return blocks, stored[..., 0]


def join_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_mxfp4``: uint8 [..., 16] and uint8 [...] as uint8 [..., 17]."""
    import torch

    stored = torch.empty((*blocks.shape[:-1], 17), dtype=torch.uint8)
    stored[..., 0] = scales
    low, high = blocks & 15, blocks >> 4
    for half, at in ((low, slice(1, None, 2)), (high, slice(2, None, 2))):
        # Of the pairs of neighbours, the first eight have the elements below 16, which are in low halves of bytes.
        stored[..., at] = half[..., :8] | (half[..., 8:] << 4)
    return stored
