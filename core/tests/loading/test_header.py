"""A weight file that lies is refused before anything of it is believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener.loading.header import read_header


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{", b"", "not valid JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": {}, "a": {}}', b"", "twice"),
        (b"\xff\xfe", b"", "not valid JSON"),
        ({"a": 3}, b"", "not a dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "not a dtype"),
        ({"a": entry("F33")}, b"\0" * 8, "unknown dtype 'F33'"),
        ({"a": entry(shape=[-2])}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=[True, 2])}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=[2.0])}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=[10**30])}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=[1] * 100_000 + [2])}, b"\0" * 8, "impossible shape"),
        ({"a": entry(shape=[2**62, 2**62])}, b"\0" * 8, "not the 8 bytes"),
        ({"a": entry(shape=[3])}, b"\0" * 8, "not the 8 bytes"),
        ({"a": entry(offsets=[8, 0])}, b"\0" * 8, "impossible data_offsets"),
        ({"a": entry(offsets=[0, 8, 16])}, b"\0" * 8, "impossible data_offsets"),
        ({"a": entry(offsets=[-8, 0])}, b"\0" * 8, "impossible data_offsets"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12, "overlap"),
        ({"a": entry(), "b": entry()}, b"\0" * 8, "overlap"),
        ({"a": entry(offsets=[4, 12])}, b"\0" * 12, "hole"),
        ({"a": entry()}, b"\0" * 7, "cut short"),
        ({"a": entry()}, b"\0" * 9, "belong to no tensor"),
    ],
)
def test_a_lying_header_is_an_error_that_says_what_is_wrong(
    header: Any, data: bytes, says: str, write_raw: Callable[..., Path]
) -> None:
    folder = write_raw(header, data)
    with pytest.raises(CheckpointError, match=says) as error:
        _ = open_checkpoint(folder).headers
    assert "model.safetensors" in str(error.value) and "fetch the file again" in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9])
def test_a_giant_header_length_is_refused_without_reading(length: int, write_raw: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="cut short"):
        _ = open_checkpoint(write_raw({}, length=length)).headers


def test_a_header_beyond_the_formats_bound_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="the format allows 100,000,000"):
        read_header(tmp_path / "a.safetensors")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cut short: it has 0 bytes"):
        read_header(tmp_path / "a.safetensors")


def test_metadata_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(save({"none": torch.zeros(0, 3), "one": torch.zeros(())}, {"format": "pt"}))
    assert {name: e.shape for name, e in read_header(path).items()} == {"none": (0, 3), "one": ()}


GOOD = save({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}, {"format": "pt"})


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), end=st.integers(0, len(GOOD)))
def test_any_damaged_file_either_reads_within_its_bytes_or_is_refused(
    at: int, byte: int, end: int, tmp_path: Path
) -> None:
    damaged = bytearray(GOOD)
    damaged[at] = byte
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(damaged[:end]))
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    assert sum(e.nbytes for e in entries.values()) == end - 8 - struct.unpack("<Q", bytes(damaged[:8]))[0]
    json.dumps(list(entries))
