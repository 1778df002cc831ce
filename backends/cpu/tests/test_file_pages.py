"""While a large weight is packed, the pages of its file do not stay in memory."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.contracts.quant import WeightPart, block_format
from evener_backend_cpu import file_pages
from evener_backend_cpu.block_packing import LANES, BlockPacking
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.file_pages import in_unchanged_file, strips
from evener_backend_cpu.native_library import Native

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc/self/smaps")
COLUMNS, ROW_BYTES = 256, 8 * 34
ROWS, STRIP = 16 * 5_000 + 5, 1 << 20
#: The system may read, and give back, so much more than it is asked for.
SLACK = 4 << 20


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Rows of Q8_0 blocks in a mapped file, not at the begin of a page; small weights are packed in strips too."""
    monkeypatch.setattr(file_pages, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(file_pages, "STRIP_BYTES", STRIP)
    random = np.random.default_rng(0).integers(0, 100, 100 + ROWS * ROW_BYTES + 5000, dtype=np.uint8)
    random.tofile(tmp_path / "weights")
    data = np.memmap(tmp_path / "weights", np.uint8, mode="c", offset=100, shape=(ROWS, ROW_BYTES))
    return torch.from_numpy(data)


def resident(tensor: torch.Tensor) -> int:
    """Bytes in memory of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("no mapping holds it")


def part(stored: torch.Tensor) -> WeightPart:
    return WeightPart("head", ROWS, COLUMNS, block_format("q8_0"), {"weight": stored})


def test_the_file_of_a_weight_takes_no_more_memory_than_a_strip_while_it_is_packed(
    stored: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, most = CpuDevice(0, {}), []
    native = device.native
    assert isinstance(native, Native)
    assert resident(stored) == 0 and int(stored.max()) > 0 and resident(stored) >= stored.nbytes

    def pack(*arguments: Any) -> None:
        native.pack(*arguments)
        most.append(resident(stored))

    noting = type("Noting", (Native,), {"__init__": lambda self: None, "pack": lambda self, *a: pack(*a)})()
    monkeypatch.setattr(CpuDevice, "native", noting)
    BlockPacking(device).pack([part(stored)], "float32", torch.device("cpu"))
    assert len(most) > 10 and max(most) <= STRIP + SLACK and resident(stored) <= SLACK


def test_tiles_that_were_packed_in_strips_are_those_of_the_whole(stored: torch.Tensor) -> None:
    packing = BlockPacking(CpuDevice(0, {}))
    assert len(list(strips(stored, LANES))) > 10 and len(list(strips(stored.clone(), LANES))) == 1
    mapped, copied = (
        packing.pack([part(each)], "float32", torch.device("cpu")).data.tensors[0] for each in (stored, stored.clone())
    )
    assert torch.equal(mapped, copied)


def test_no_page_that_was_written_is_given_back(stored: torch.Tensor) -> None:
    assert in_unchanged_file(stored)
    before = stored.clone()
    stored[7, 3] += 1
    assert not in_unchanged_file(stored)
    (whole,) = strips(stored, LANES)
    assert whole[7, 3] == before[7, 3] + 1


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("kind", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_memory_without_a_file_keeps_its_numbers(kind: int) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 8 << 20, flags=kind | mmap.MAP_ANONYMOUS), dtype=torch.uint8).fill_(7)
    assert kind == mmap.MAP_SHARED or not in_unchanged_file(memory)
    assert all((rows == 7).all() for rows in strips(memory.view(-1, 1024), LANES)) and (memory == 7).all()


def test_nothing_is_given_back_where_the_system_does_not_say(
    stored: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(file_pages, "_MAPPINGS", tmp_path / "nothing")
    assert not in_unchanged_file(stored) and len(list(strips(stored, LANES))) == 1
