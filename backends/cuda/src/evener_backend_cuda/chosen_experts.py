"""Which chosen experts of those in host memory the device computes, and their copies, each in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from evener_backend_cuda.chosen_kernel import copy_kernel, split_kernel

#: Words that a program copies: each of its threads has eight reads of 16 bytes under way. Ids that are looked at
#: together.
_TILE, _PAIRS = 4096, 64
_WARPS = 4


def split_chosen(
    ids: torch.Tensor, held: torch.Tensor | None, experts: int, most: int, part: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the experts that tokens have chosen between the device and the host. The device gets the first ones that
    have no place yet, ``part`` of 256 of them, rounded, but at most ``most``.

    Args:
        ids: int32 [T, k], contiguous.
        held: int32 [experts, 1]: not negative for experts that have a place; None: none has.

    Returns:
        int32: ids [T, k] with ``experts`` in the place of the device's; slots [experts, 1], -1 for others; 1 for the
        device's and 0 for others [experts]; the expert in each slot [most]; how many slots are used [1].
    """
    made = [
        torch.empty(shape, dtype=torch.int32, device=ids.device) for shape in ((experts, 1), (experts,), (most,), (1,))
    ]
    others, width = torch.empty_like(ids), triton.next_power_of_2(experts)
    split_kernel[(1,)](
        ids, ids if held is None else held, others, *made, ids.numel(), experts, most, part,
        HELD=held is not None, EXPERTS=width, PAIRS=_PAIRS, num_warps=_WARPS,
    )  # fmt: skip
    slots, copies, of_slot, used = made
    return others, slots, copies, of_slot, used


def copy_chosen(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], experts: torch.Tensor, used: torch.Tensor
) -> None:
    """Copy row ``experts[i]`` of each source to row i of its target, for each i less than ``used``. Sources are int32
    [experts, words] in memory that the device reads, targets int32 [slots, words]."""
    words = tuple(each.shape[1] for each in sources)
    tiles = sum(triton.cdiv(count, _TILE) for count in words)
    copy_kernel[(tiles, len(experts))](
        tuple(sources), tuple(targets), words, experts, used, TENSORS=len(words), TILE=_TILE, num_warps=_WARPS
    )
