"""Weights in huge pages: the plain layout at another place."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

from evener.contracts.quant import WeightPart, plain
from evener.ops.reference.linear import PLAIN
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.huge_pages import Arena, HugePacking, available, begin_small

CPU = torch.device("cpu")


def parts(*rows: int, columns: int = 24) -> list[WeightPart]:
    return [WeightPart(str(n), n, columns, plain("float32"), {"weight": torch.randn(n, columns)}) for n in rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_weight_is_the_plain_one(dtype: str) -> None:
    packing = HugePacking(Arena())
    for given in (parts(7), parts(5, 9, 1), parts(0)):
        assert packing.supports(given, dtype) is None
        got, want = packing.pack(given, dtype, CPU), PLAIN.pack(given, dtype, CPU)
        assert torch.equal(got.data, want.data) and got.data.is_contiguous()
        assert (got.layout, got.shape, got.nbytes) == (want.layout, want.shape, want.nbytes)
        assert got.nbytes == packing.nbytes(given, dtype) and not packing.keeps_storage(given)
    stacks = [p.pack_stack([parts(3, 4)] * 3, 3, dtype, CPU) for p in (packing, PLAIN)]
    assert stacks[0].shape == stacks[1].shape == (3, 7, 24)


def test_arena_tensors_do_not_overlap_and_outlive_the_arena() -> None:
    arena, given = Arena(), []
    for number, shape in enumerate([(3, 5), (70 << 20,), (1,), (40 << 20,), (30 << 20,), (7, 2)]):
        made = arena.take(shape, torch.uint8)
        assert made.shape == shape and made.data_ptr() % 64 == 0
        made[-1] = number
        given.append(made)
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in given)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    del arena
    gc.collect()
    assert [int(t.flatten()[-1]) for t in given] == list(range(6))


def test_huge_pages_are_used_only_if_enabled_and_available(tmp_path: Path) -> None:
    assert CpuDevice(0, {"huge_pages": "off"}).plain is PLAIN
    if available():
        assert isinstance(CpuDevice(0, {}).plain, HugePacking)
    for text, there in (("always [madvise] never", True), ("[always] madvise never", True), ("always [never]", False)):
        (tmp_path / "enabled").write_text(text)
        assert available(tmp_path / "enabled") is there
    assert not available(tmp_path / "nothing")


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("no mapping holds it")


@pytest.mark.skipif(not available(), reason="the system has no huge pages")
def test_each_layers_state_begins_in_small_pages_and_goes_on_in_huge_ones() -> None:
    pool = CpuDevice(0, {}).zeros(4 * 41_000_000).view(4, 1000, 41_000)
    before = flags_at(pool.data_ptr() + (1 << 20))
    for layer in pool:
        begin_small(layer)
    for layer in pool:
        first = layer.data_ptr()
        behind = -(-(first + (64 << 10)) // (2 << 20)) * (2 << 20)
        assert all("nh" in flags_at(at) for at in (first + 4096, first + (64 << 10) - 1, behind - 1))
        assert flags_at(behind) == before and flags_at(first + layer.nbytes - (2 << 20)) == before


@pytest.mark.skipif(not available(), reason="the system has no huge pages")
def test_memory_that_others_may_get_later_stays_as_it_is() -> None:
    small = torch.zeros(1000, 5000, dtype=torch.uint8)  # less than any size that surely has a mapping of its own
    begin_small(small)
    assert "nh" not in flags_at(small.data_ptr() + 8192)
