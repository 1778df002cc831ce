"""Packed weights that a model cache saved: the restored ones multiply to the same bits, and stay where their file is
mapped unless the device keeps weights in huge pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from packed_blocks import multiply
from test_cpu_stored import CPU, rows_of

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import MXFP4, PackedWeight, Packing, WeightPart
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeGroupedLinear
from evener_backend_cpu.huge_pages import available
from evener_conformance.kit.cases.blocks import random_part

#: The storages of a weight's parts, and the packing.
WEIGHTS = {
    ("q4_k", "q6_k"): "blocks", ("q5_0", "float32"): "blocks", (MXFP4.storage,): "blocks",
    ("uint4 by 64, act", "uint4 by 32, zeros"): "blocks", ("uint4 by 128, zeros, act, piece",): "blocks",
    ("int8 by 128, act",): "blocks", ("int8 by row", "float32"): "stored", ("e4m3 by block",): "stored",
    ("nvfp4", "nf4 by 64"): "blocks", ("float32",): "plain",
}  # fmt: skip
Storages = tuple[str, ...]


def parts_of(storages: Storages, seed: int = 0) -> list[WeightPart]:
    draw = torch.Generator().manual_seed(seed)
    return [random_part(storage, 40, 512, draw) for storage in storages]


def restored(packing: Packing, weight: PackedWeight, parts: Sequence[WeightPart], count: int = 0) -> PackedWeight:
    saved = packing.saved(weight)
    assert saved is not None
    bare = [replace(part, tensors={}) for part in parts]
    return packing.restored([each.clone() for each in saved], bare, count, "float32", CPU)


@pytest.mark.parametrize("huge", ["auto", "off"])
@pytest.mark.parametrize("storages", WEIGHTS)
def test_a_restored_weight_multiplies_to_the_same_bits(storages: Storages, huge: str) -> None:
    device = CpuDevice(0, {"huge_pages": huge})
    packing: Packing = getattr(device, WEIGHTS[storages])
    parts = parts_of(storages)
    weight = packing.pack(parts, "float32", CPU)
    again = restored(packing, weight, parts)
    assert (again.layout, again.shape, again.nbytes, again.formats) == (
        weight.layout, weight.shape, weight.nbytes, weight.formats,
    )  # fmt: skip
    for tokens in (1, 5, 40):
        x = rows_of(tokens, 512, "float32")
        assert torch.equal(multiply(device, again, x), multiply(device, weight, x))


@pytest.mark.parametrize("storages", [s for s in WEIGHTS if WEIGHTS[s] != "plain"])
def test_a_restored_stack_multiplies_to_the_same_bits(storages: Storages) -> None:
    device = CpuDevice(0, {})
    packing: Packing = getattr(device, WEIGHTS[storages])
    matrices = [parts_of(storages, seed) for seed in range(3)]
    weight = packing.pack_stack(iter(matrices), 3, "float32", CPU)
    again = restored(packing, weight, matrices[0], 3)
    assert (again.shape, again.nbytes) == (weight.shape, weight.nbytes)
    static = {"rows": weight.shape[1], "columns": 512, "experts": 3, "dtype": "float32"}
    kernel = NativeGroupedLinear(device)
    run = kernel.build(OpCall("grouped_linear", static, Bucket(1, 64), device.capabilities, {"weight": weight.layout}))
    x, slots = rows_of(7, 512, "float32"), torch.arange(14, dtype=torch.int32).view(7, 2) % 3
    one, other = run(x, weight, slots, None), run(x, again, slots, None)
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


@pytest.mark.parametrize("storages", WEIGHTS)
def test_without_huge_pages_a_restored_weight_is_the_mapped_memory(storages: Storages) -> None:
    for huge in ("off", "auto"):
        device = CpuDevice(0, {"huge_pages": huge})
        packing: Packing = getattr(device, WEIGHTS[storages])
        parts = parts_of(storages)
        saved = packing.saved(packing.pack(parts, "float32", CPU))
        assert saved is not None
        again = packing.restored(saved, [replace(p, tensors={}) for p in parts], 0, "float32", CPU)
        kept = [t.data_ptr() for t in packing.saved(again) or ()] == [t.data_ptr() for t in saved]
        assert kept == (huge == "off" or not available())


def test_tensors_of_another_weight_are_refused() -> None:
    device = CpuDevice(0, {})
    for storages, name in WEIGHTS.items():
        packing: Packing = getattr(device, name)
        parts = parts_of(storages)
        saved = list(packing.saved(packing.pack(parts, "float32", CPU)) or ())
        bare = [replace(part, tensors={}) for part in parts]
        for wrong in (saved[:-1], [*saved, saved[0]], [*saved[:-1], saved[-1].reshape(-1)[:-1]], []):
            with pytest.raises(ValueError, match=r"tensor|plain packing"):
                packing.restored(wrong, bare, 0, "float32", CPU)


def test_an_order_that_leaves_the_columns_is_refused() -> None:
    """The kernel would read outside of the activations."""
    device = CpuDevice(0, {})
    parts = parts_of(("uint4 by 64, act",))
    bare = [replace(part, tensors={}) for part in parts]
    (room,) = device.blocks.saved(device.blocks.pack(parts, "float32", CPU)) or ()
    for place, number in ((-1, 1 << 20), (-1, -32), (-1, 33), (-2, 512)):
        wrong = room.clone()
        wrong[-4 * 513 :].view(torch.int32)[place] = number
        with pytest.raises(ValueError, match="order"):
            device.blocks.restored([wrong], bare, 0, "float32", CPU)
