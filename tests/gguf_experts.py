"""GGUF files of models with experts, as llama.cpp's converter writes them: a stack for each projection of a layer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf_files import write_gguf
from safetensors.torch import load_file

#: Of a family: its name in the file, and the parts of the names of its layers' tensors.
_COMMON = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_STACKS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def stacked(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder by their names in a file; experts are stacked."""
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in _TOP:
            found[f"{_TOP[stem]}.weight"] = tensor
            continue
        number, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem).groups()  # type: ignore[union-attr]
        if expert := _EXPERT.fullmatch(part):
            stacks.setdefault(f"blk.{number}.ffn_{_STACKS[expert[2]]}_exps", {})[int(expert[1])] = tensor
            continue
        if config["model_type"] == "mixtral" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        found[f"blk.{number}.{_COMMON[part]}.weight"] = tensor
    return found | {f"{name}.weight": torch.stack([s[i] for i in range(len(s))]) for name, s in stacks.items()}


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The family's keys."""
    heads, count = config["num_attention_heads"], config.get("num_experts") or config["num_local_experts"]
    keys = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "expert_count": count,
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "rope.freq_base": (config.get("rope_parameters") or config)["rope_theta"],
        "expert_used_count": config["num_experts_per_tok"],
    }  # fmt: skip
    inner = config.get("moe_intermediate_size")
    return keys | ({"expert_feed_forward_length": inner} if inner else {})


def write_experts(folder: Path, path: Path, kind: str | Callable[[str], str]) -> Path:
    """The file of the Qwen 3 MoE or Mixtral in ``folder``, whose matrices are stored as ``kind``."""
    config = json.loads((folder / "config.json").read_text())
    family = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}[config["model_type"]]
    return write_gguf(path, family, keys_of(config), stacked(folder), kind)
