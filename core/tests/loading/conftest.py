"""Writing model folders by hand, well-formed and hostile."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["TinyForCausalLM"], "model_type": "tiny", "vocab_size": 20, "hidden_size": 12,
    "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def write_raw(tmp_path: Path) -> Callable[..., Path]:
    """``write_raw(header, data, name)``: a safetensors file of exactly these bytes, beside a config.json."""

    def write(header: Any, data: bytes = b"", name: str = "model.safetensors", length: int | None = None) -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / name).write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
        return tmp_path

    return write


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """``write_folder(tensors, config)``: a model folder with one weight file."""

    def write(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write
