"""A weight file that lies is refused before anything of it is believed."""

from __future__ import annotations

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
from evener_formats.safetensors_files import SafetensorsFile


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{", b"", "invalid JSON"),
        (b"[]", b"", "invalid JSON"),
        (b"[" * 100_000, b"", "invalid JSON"),
        (b'{"a": {}, "a": {}}', b"", "missing field"),
        (b"\xff\xfe", b"", "invalid UTF-8"),
        ({"a": 3}, b"", "invalid type: integer `3`"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "missing field `data_offsets`"),
        ({"a": entry("F33")}, b"\0" * 8, "`F33`"),
        ({"a": entry(shape=[-2])}, b"\0" * 8, "invalid value: integer `-2`"),
        ({"a": entry(shape=[True, 2])}, b"\0" * 8, "invalid type: boolean"),
        ({"a": entry(shape=[2.0])}, b"\0" * 8, "invalid type: floating point"),
        ({"a": entry(shape=[10**30])}, b"\0" * 8, "invalid type: floating point"),
        ({"a": entry(shape=[1] * 100_000 + [2])}, b"\0" * 8, "'a' has 100,001 axes"),
        ({"a": entry(shape=[2**62, 2**62])}, b"\0" * 8, "overflow"),
        ({"a": entry(shape=[3])}, b"\0" * 8, "invalid shape"),
        ({"a": entry(offsets=[8, 0])}, b"\0" * 8, "invalid offset for tensor `a`"),
        ({"a": entry(offsets=[0, 8, 16])}, b"\0" * 8, "invalid length 3"),
        ({"a": entry(offsets=[-8, 0])}, b"\0" * 8, "invalid value: integer `-8`"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12, "invalid offset for tensor `b`"),
        ({"a": entry(), "b": entry()}, b"\0" * 8, "invalid offset for tensor"),
        ({"a": entry(offsets=[4, 12])}, b"\0" * 12, "invalid offset for tensor `a`"),
        ({"a": entry()}, b"\0" * 7, "file not fully covered"),
        ({"a": entry()}, b"\0" * 9, "file not fully covered"),
    ],
)
def test_an_inconsistent_header_raises_with_the_reason(
    header: Any, data: bytes, says: str, write_raw: Callable[..., Path]
) -> None:
    folder = write_raw(header, data)
    with pytest.raises(CheckpointError, match=says) as error:
        _ = open_checkpoint(folder).headers
    assert "model.safetensors" in str(error.value) and "fetch the file again" in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9])
def test_a_giant_header_length_is_refused_without_reading(length: int, write_raw: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="header too large"):
        _ = open_checkpoint(write_raw({}, length=length)).headers


def test_a_header_beyond_the_formats_bound_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="header too large"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="header too small"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_metadata_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(save({"none": torch.zeros(0, 3), "one": torch.zeros(())}, {"format": "pt"}))
    assert SafetensorsFile(path).headers == {"none": ("float32", (0, 3)), "one": ("float32", ())}


GOOD = save({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}, {"format": "pt"})


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), end=st.integers(0, len(GOOD)))
def test_any_damaged_file_either_reads_within_its_bytes_or_is_refused(
    at: int, byte: int, end: int, tmp_path: Path
) -> None:
    damaged = bytearray(GOOD)
    damaged[at] = byte
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(damaged[:end]))
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    data = 8 + struct.unpack("<Q", bytes(damaged[:8]))[0]
    assert all(data <= file.extent(name).offset <= end for name in file.headers)
    assert sum(file.tensor(name).nbytes for name in file.headers) == end - data
