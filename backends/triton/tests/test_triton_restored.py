"""Weights that a model cache saved: the restored ones have the same structure and the same tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_packed import STORAGES, random_parts
from test_triton_stored import FORMS, part

from evener.contracts.quant import Packing, WeightPart
from evener_conformance.kit.cases.blocks import random_part
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.stored import STORED

HOST = torch.device("cpu")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.stride() == other.stride() and torch.equal(
            one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        )  # fmt: skip
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one)
        )
    return bool(one == other)


def check(packing: Packing, matrices: Sequence[Sequence[WeightPart]]) -> None:
    bare = [replace(each, tensors={}) for each in matrices[0]]
    count = len(matrices)
    stack = packing.pack_stack(iter(matrices), count, "float32", HOST)
    for made, number in ((packing.pack(matrices[0], "float32", HOST), 0), (stack, count)):
        saved = packing.saved(made)
        assert saved is not None
        again = packing.restored([t.clone() for t in saved], bare, number, "float32", HOST)
        assert same(replace(made, data=None), replace(again, data=None)) and same(made.data, again.data)
        for wrong in (saved[:-1], [*saved, saved[0]], [t.flatten() for t in saved]):
            with pytest.raises(ValueError, match="tensor"):
                packing.restored(wrong, bare, number, "float32", HOST)


@pytest.mark.parametrize("storage", STORAGES)
def test_packed_weights_are_restored(storage: str) -> None:
    check(PACKED, [random_parts([storage, storage], 512, (18, 7), seed) for seed in range(2)])
    if "act" not in storage:
        check(PACKED, [random_parts([storage, "q6_k"], 512, (18, 7), seed) for seed in range(2)])


@pytest.mark.parametrize(("group", "high"), FORMS)
@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn"])
def test_stored_weights_are_restored(storage: str, group: int, high: int) -> None:
    matrices = [[part(n, 200, storage, group, high, seed) for n in (50, 14)] for seed in range(2)]
    check(STORED, matrices)


def test_stored_weights_with_one_scale_for_activations_are_restored() -> None:
    draw = torch.Generator().manual_seed(0)
    check(STORED, [[random_part("e4m3 by tensor, x fixed", 32, 512, draw)] for _ in range(2)])
