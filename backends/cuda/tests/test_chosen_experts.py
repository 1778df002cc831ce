"""Chosen experts that pass: the kernels, run by Triton's interpreter, against what any device computes."""

from __future__ import annotations

import pytest
import torch
from interpreted import every_access_checked

from evener_backend_cuda.chosen_experts import copy_chosen, split_chosen
from evener_offload import passing_chosen

CASES = [(128, 16, 8, 42, 100, False), (60, 3, 4, 5, 256, True), (8, 2, 2, 8, 1, True), (256, 64, 8, 77, 84, True),
         (128, 16, 8, 20, 128, True), (16, 1, 2, 40, 256, False)]  # fmt: skip


@pytest.mark.parametrize(("experts", "tokens", "top", "most", "part", "some_held"), CASES)
def test_experts_are_split_as_on_any_device(
    experts: int, tokens: int, top: int, most: int, part: int, some_held: bool
) -> None:
    random = torch.Generator().manual_seed(experts)
    ids = torch.rand(tokens, experts, generator=random).argsort(1)[:, :top].int().contiguous()
    places = torch.where(torch.rand(experts, 1, generator=random) < 0.5, 3, -1).int()
    held = places if some_held else None
    with every_access_checked():
        found = split_chosen(ids, held, experts, most, part)
    want = passing_chosen.split_chosen(ids, held, experts, most, part)
    for one, other in zip(found, want, strict=True):
        assert one.dtype == torch.int32
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("used", [0, 1, 5])
def test_only_experts_of_used_slots_are_copied(used: int) -> None:
    """Of tensors with less than a tile, one tile, and more."""
    random = torch.Generator().manual_seed(used)
    sources = [torch.randint(1, 99, (16, words), generator=random, dtype=torch.int32) for words in (32, 4096, 9000)]
    targets = [torch.zeros(5, source.shape[1], dtype=torch.int32) for source in sources]
    experts = torch.tensor([3, 9, 0, 15, 4], dtype=torch.int32)
    with every_access_checked():
        copy_chosen(sources, targets, experts, torch.tensor([used], dtype=torch.int32))
    for source, target in zip(sources, targets, strict=True):
        torch.testing.assert_close(target[:used], source[experts[:used].long()], rtol=0, atol=0)
        assert not target[used:].any()
