"""Damaged and hostile weight files of folders: opened or refused with one kind of error, never run, never unpacked."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0)}
KINDS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda path: save_file(TENSORS, path),
    "pytorch_model.bin": lambda path: torch.save(TENSORS, path),
}
NUMBERS = [0, 1, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    """Some bytes flipped, cut, doubled, or made giant numbers."""
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        what = data.draw(st.sampled_from(["flip", "giant", "cut", "drop", "double"]))
        if what == "flip":
            raw[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif what == "giant":
            raw[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(NUMBERS)))
        elif what == "cut":
            del raw[at:]
        elif what == "drop":
            del raw[at : at + data.draw(st.integers(1, 64))]
        else:
            raw[at:at] = raw[at : at + data.draw(st.integers(1, 64))]
    return bytes(raw)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_corrupted_file_opens_or_is_refused_within_bounded_memory(
    name: str, data: st.DataObject, tmp_path: Path, config: dict[str, Any]
) -> None:
    path = tmp_path / name
    (tmp_path / "config.json").write_text(json.dumps(config))
    KINDS[name](path)
    path.write_bytes(damaged(data, path.read_bytes()))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(tmp_path)
        for tensor in checkpoint.headers:
            checkpoint.tensor(tensor)
    except CheckpointError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20_000_000
