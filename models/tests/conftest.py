"""Tiny random models, made by transformers and saved as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from family_oracles import make_transformers
from family_table import Row

TinyModel = Callable[..., tuple[Any, Path]]


@pytest.fixture
def tiny_model(tmp_path: Path) -> TinyModel:
    """``tiny_model(row, **save options)``: transformers' model of a row's config in fp32, and the folder that it was
    saved in."""

    def make(row: Row, **options: Any) -> tuple[Any, Path]:
        return make_transformers(row.config, tmp_path, **options), tmp_path

    return make


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``write_gguf(family, keys, tensors, kind)``: a GGUF file."""

    def write(*arguments: Any, name: str = "m.gguf", **more: Any) -> Path:
        return gguf_files.write_gguf(tmp_path / name, *arguments, **more)

    return write
