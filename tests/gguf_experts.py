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
    "block_sparse_moe.gate": "ffn_gate_inp", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b", "mlp.gate_proj": "ffn_gate",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
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
        if part == "mlp.gate.e_score_correction_bias":
            found[f"blk.{number}.exp_probs_b.bias"] = tensor
            continue
        if part == "self_attn.kv_b_proj":
            by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            found[f"blk.{number}.attn_k_b.weight"] = keys.transpose(1, 2).contiguous()
            found[f"blk.{number}.attn_v_b.weight"] = values.contiguous()
            continue
        if config["model_type"] == "mixtral" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        found[f"blk.{number}.{_COMMON[part]}.weight"] = tensor
    return found | {f"{name}.weight": torch.stack([s[i] for i in range(len(s))]) for name, s in stacks.items()}


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The family's keys."""
    heads, latent = config["num_attention_heads"], config["model_type"].startswith("deepseek")
    count = config.get("num_experts") or config.get("n_routed_experts") or config["num_local_experts"]
    keys = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "expert_count": count,
        "rope.freq_base": (config.get("rope_parameters") or config)["rope_theta"],
        "expert_used_count": config["num_experts_per_tok"],
    }  # fmt: skip
    inner = config.get("moe_intermediate_size")
    keys |= {"expert_feed_forward_length": inner} if inner else {}
    if not latent:
        return keys | {f"attention.{each}_length": config["head_dim"] for each in ("key", "value")}
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return keys | {
        "attention.head_count_kv": 1, "attention.q_lora_rank": config["q_lora_rank"], "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated, "attention.value_length": rank, "rope.dimension_count": rotated,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"], "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]), "expert_group_count": config["n_group"],
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "expert_group_used_count": config["topk_group"],
    }  # fmt: skip


def write_experts(folder: Path, path: Path, kind: str | Callable[[str], str]) -> Path:
    """The file of the Qwen 3 MoE, Mixtral or DeepSeek V2 or V3 in ``folder``, whose matrices are stored as ``kind``."""
    config = json.loads((folder / "config.json").read_text())
    family = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}.get(config["model_type"], "deepseek2")
    return write_gguf(path, family, keys_of(config), stacked(folder), kind)
