"""Small GGUF files and SentencePiece models."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import sentencepiece_models

from evener_formats.tokenizers.sentencepiece_tokenizer import FILE

Folder = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``write_gguf(family, keys, tensors, kind)``: a GGUF file."""

    def write(*arguments: Any, name: str = "m.gguf", **more: Any) -> Path:
        return gguf_files.write_gguf(tmp_path / name, *arguments, **more)

    return write


@pytest.fixture(scope="module")
def trained() -> Callable[[str], bytes]:
    """A model by its name in ``sentencepiece_models.OPTIONS``, trained once."""
    made: dict[str, bytes] = {}

    def train(name: str) -> bytes:
        if name not in made:
            made[name] = sentencepiece_models.train(**sentencepiece_models.OPTIONS[name])
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


@pytest.fixture(scope="session")
def ggml() -> ctypes.CDLL:
    """ggml's library in the environment of ``make llamacpp``."""
    root = Path(os.environ.get("LLAMACPP", Path.home() / ".cache/evener/llamacpp"))
    found = sorted(root.glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.so*"))
    if not found:
        pytest.fail(f"no llama.cpp in {root}; type: make llamacpp", pytrace=False)
    return ctypes.CDLL(str(found[0]))
