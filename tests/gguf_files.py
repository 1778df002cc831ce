"""Writing GGUF files: whole tiny models, and bytes by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]

#: A byte-level tokenizer of 259 tokens and one merge.
LETTERS = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
TOKENS = ["<bos>", "<eos>", *LETTERS, "Ġt"]
TYPES = [3, 3, *[1] * 257]
TEMPLATE = "{{ messages[0].content }}"


def write_gguf(
    path: Path, family: str, keys: Mapping[str, Any], tensors: Tensors, kind: str = "F32", **more: Any
) -> Path:
    """Write a file with a tokenizer; ``keys`` get the family's prefix, matrices are stored as ``kind``."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in {**{f"{family}.{k}": v for k, v in keys.items()}, **tokenizer_keys(), **more}.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        matrix = tensor.ndim == 2 and kind != "F32"
        wanted = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        data = tensor.float().numpy()
        writer.add_tensor(name, gguf.quants.quantize(data, wanted) if matrix else data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One key of the type that converters give it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def tokenizer_keys() -> dict[str, Any]:
    """Keys of the byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES, "tokenizer.ggml.merges": ["Ġ t"], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def dequantized(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What a file of ``kind`` gives back of a matrix."""
    wanted = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(np.array(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), wanted), wanted)))
