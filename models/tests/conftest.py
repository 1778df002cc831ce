"""Tiny random models, made by transformers and saved as folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import piece_models
import pytest
from family_oracles import make_transformers
from family_table import Row

from evener_models.sentencepiece_tokenizer import FILE

TinyModel = Callable[..., tuple[Any, Path]]
Folder = Callable[..., Path]


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


@pytest.fixture(scope="module")
def trained() -> Callable[[str], bytes]:
    """A model by its name in ``piece_models.OPTIONS``, trained once."""
    made: dict[str, bytes] = {}

    def train(name: str) -> bytes:
        if name not in made:
            made[name] = piece_models.train(**piece_models.OPTIONS[name])
        return made[name]

    return train


@pytest.fixture
def folder(tmp_path: Path, trained: Callable[[str], bytes]) -> Folder:
    """``folder(name, config, **files)``: a folder with a trained model and JSON files."""

    def make(name: str, config: dict[str, Any] | None, /, **files: dict[str, Any]) -> Path:
        (tmp_path / FILE).write_bytes(trained(name))
        for stem, content in {"tokenizer_config": config, **files}.items():
            if content is not None:
                (tmp_path / f"{stem}.json").write_text(json.dumps(content))
        return tmp_path

    return make
