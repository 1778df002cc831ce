"""Weights on their way to a device: through a ring of few buffers, right whenever copies happen, and nothing is left
behind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from evener.contracts.checkpoint import Extent
from evener.errors import CheckpointError
from evener.loading import uploader
from evener.loading.uploader import Uploader
from evener_conformance.reference.pinned_buffer_device import PinnedBufferDevice


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "MIN_READ_BYTES", 16)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No reader thread and no open file of the test's. An ``AsyncLLM`` of another test may have such a thread, too."""
    before = set(threading.enumerate())
    yield
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("evener-reader")]
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    assert not [path for path in opened if path.startswith(str(tmp_path))]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 64, 65, 1000])
def test_bytes_arrive_in_order_for_every_size_and_ring_length(tmp_path: Path, size: int, count: int) -> None:
    data = torch.arange(size + 7, dtype=torch.int64).remainder(251).to(torch.uint8)
    (tmp_path / "data").write_bytes(bytes(data.tolist()))
    device = PinnedBufferDevice(count)
    with closing(Uploader(device, device.buffers)) as moving:
        from_file = moving.move("x", torch.empty(size, dtype=torch.uint8), Extent(tmp_path / "data", 7))
        from_memory = moving.move("x", data[7:].clone(), None)
    assert torch.equal(from_file, data[7:])
    assert torch.equal(from_memory, data[7:])


def test_a_deleted_file_raises_with_its_name(tmp_path: Path) -> None:
    device = PinnedBufferDevice()
    with (
        pytest.raises(CheckpointError, match=r"cannot read 'x' from .*gone: No such file or directory; fetch"),
        closing(Uploader(device, device.buffers)) as moving,
    ):
        moving.move("x", torch.empty(40), Extent(tmp_path / "gone", 0))
