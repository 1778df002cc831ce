"""Writing GGUF files: whole tiny models, and bytes by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from evener_formats.gguf.header import UNPACKED
from evener_formats.quantize.blocks import to_blocks

Tensors = Mapping[str, torch.Tensor]

#: A byte-level tokenizer of 259 tokens and one merge.
LETTERS = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
TOKENS = ["<bos>", "<eos>", *LETTERS, "Ġt"]
TYPES = [3, 3, *[1] * 257]
TEMPLATE = "{{ messages[0].content }}"


def write_gguf(
    path: Path, family: str, keys: Mapping[str, Any], tensors: Tensors, kind: str | Callable[[str], str] = "F32",
    **more: Any,
) -> Path:  # fmt: skip
    """Write a file with a tokenizer; ``keys`` get the family's prefix, matrices are stored as ``kind``, or what that
    says for a name."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in {**{f"{family}.{k}": v for k, v in keys.items()}, **tokenizer_keys(), **more}.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        form = "F32" if tensor.ndim < 2 else kind if isinstance(kind, str) else kind(name)
        data = tensor.float().numpy() if form == "F32" else in_blocks(tensor, form)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_blocks(tensor: torch.Tensor, kind: str) -> np.ndarray[Any, Any]:
    """A matrix, or a stack of them, in blocks: uint8 [..., bytes of a row]. The library writes no K formats. Bytes are
    such blocks already."""
    if tensor.dtype == torch.uint8:
        return tensor.numpy()
    if kind.endswith("_K"):
        return to_blocks(kind.lower(), tensor).numpy()
    return gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind])


#: A Llama of one layer whose matrices have 256 columns.
WIDE = {
    "context_length": 64, "embedding_length": 256, "block_count": 1, "feed_forward_length": 256,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def in_iq_blocks(storage: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random blocks of a format of ``UNPACKED``, uint8 [rows, bytes of a row]. Their scales give numbers below 10."""
    elements, nbytes = UNPACKED[storage]
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (rows, columns // elements, nbytes), generator=draw, dtype=torch.uint8)
    if storage == "iq1_m":  # the upper halves of four bytes are its scale
        blocks[:, :, 49:56:2] &= 0x0F
        blocks[:, :, 55] |= 0x20
    else:  # sign, exponent and two bits of the scale
        at = {"tq1_0": 53, "tq2_0": 65}.get(storage, 1)
        exponent = {"iq1": 0x28, "iq2": 0x1C, "iq3": 0x18, "tq1": 0x30, "tq2": 0x30}.get(storage[:3], 0x18)
        blocks[:, :, at] = blocks[:, :, at] & 0x83 | (0x08 if storage == "iq4_xs" else exponent)
    return blocks.flatten(1)


def unpacked_file(path: Path, storage: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of ``WIDE`` whose projections have a format of ``UNPACKED``, and these in blocks by GGUF's names."""
    rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256,
            "ffn_down": 256}  # fmt: skip
    blocks = {
        f"blk.0.{name}.weight": in_iq_blocks(storage, n, 256, seed) for seed, (name, n) in enumerate(rows.items())
    }
    norms = {f"{name}.weight": torch.ones(256) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
    table = {"token_embd.weight": torch.randn(259, 256, generator=torch.Generator().manual_seed(9)) * 0.02}

    def kind(name: str) -> str:
        return storage.upper() if name in blocks else "Q8_0"

    return write_gguf(path, "llama", WIDE, {**blocks, **norms, **table}, kind), blocks


def q4_k_m(name: str) -> str:
    """The format of a matrix in a Q4_K_M file, where the half of the layers with better formats is the first one of
    two."""
    if "ffn_gate_inp" in name:
        return "F32"
    if "attn_k_b" in name:
        return "Q8_0"  # its rows are shorter than a block of the K formats
    better = name.startswith("blk.0.") and ("attn_v" in name or "ffn_down" in name)
    return "Q6_K" if better or name == "output.weight" else "Q4_K"


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
    return torch.from_numpy(np.array(gguf.quants.dequantize(in_blocks(tensor, kind), wanted)))
