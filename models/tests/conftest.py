"""Tiny random models, made by transformers and saved as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
