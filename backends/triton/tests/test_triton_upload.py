"""Stored matrices reach a device through page-locked memory, which threads fill."""

from __future__ import annotations

import threading

import pytest
import torch

from evener_kernels_triton import upload
from evener_kernels_triton.upload import Uploads

#: No tensor of it is made here: its name says that copies go through page-locked memory.
DEVICE = torch.device("cuda")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The pieces that threads read; memory that a test can use is not page-locked."""
    read: list[torch.Tensor] = []

    def fill(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        assert threading.current_thread().name.startswith("evener-upload")
        assert sum(each.nbytes for each in rows) <= upload.PIECE_BYTES
        read.append(torch.cat([each.flatten() for each in rows]))
        return [each.clone() for each in rows]

    monkeypatch.setattr(upload, "_page_locked", fill)
    monkeypatch.setattr(upload, "_has_page_locked_memory", lambda device: device == DEVICE)
    monkeypatch.setattr(upload, "PIECE_BYTES", 64)
    monkeypatch.setattr(upload, "AHEAD", 3)
    return read


def test_matrices_arrive_whole_in_pieces_of_rows(pieces: list[torch.Tensor]) -> None:
    wide = torch.arange(50 * 48).to(torch.uint8).view(50, 48)
    matrices = [wide[:, :24], wide[7:30], wide[:1], wide[:1, 40:]]  # the first is a rank's columns: its rows lie apart
    to = [torch.zeros(matrix.shape, dtype=torch.uint8) for matrix in matrices]
    with Uploads(DEVICE) as uploads:
        for place, matrix in zip(to, matrices, strict=True):
            uploads.copy(place, matrix)
    assert all(map(torch.equal, to, matrices))
    assert sorted(piece.nbytes for piece in pieces) == [48] * 48 + [56]  # the last one shares a piece


def test_no_more_pieces_are_in_memory_than_are_read_ahead(pieces: list[torch.Tensor]) -> None:
    rows, to = torch.ones(40, 64, dtype=torch.uint8), torch.zeros(40, 64, dtype=torch.uint8)
    with Uploads(DEVICE) as uploads:
        uploads.copy(to, rows)
        assert len(uploads._reading) == 3 and to[:36].all() and not to[36:].any()  # the last row waits for company
    assert to.all() and len(pieces) == 40


def test_an_error_ends_the_threads(pieces: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="the next matrix is broken"), Uploads(DEVICE) as uploads:
        uploads.copy(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 64, dtype=torch.uint8))
        raise ValueError("the next matrix is broken")
    assert not [each for each in threading.enumerate() if each.name.startswith("evener-upload")]


def test_on_the_host_and_from_a_device_copies_are_done_at_once(pieces: list[torch.Tensor]) -> None:
    to = torch.zeros(2, 8)
    with Uploads(torch.device("cpu")) as uploads:
        uploads.copy(to, torch.ones(2, 8))
        assert to.all()
    with Uploads(DEVICE) as uploads:
        uploads.copy(torch.zeros(2, 8, device="meta"), torch.ones(2, 8, device="meta"))
    assert not pieces


@pytest.mark.parametrize(("device", "here"), [("cuda", True), ("cpu", False), ("meta", False)])
def test_only_torch_s_accelerator_has_page_locked_memory(
    device: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not upload._has_page_locked_memory(torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: DEVICE)
    assert upload._has_page_locked_memory(torch.device(device)) is here
