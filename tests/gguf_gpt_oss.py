"""A tiny gpt-oss with experts in MXFP4: its folder, and the GGUF file that llama.cpp's converter would write of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from family_oracles import make_transformers
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file

from evener_conformance.naive.model import find_architecture

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight", "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias", "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    **{f"self_attn.{x}_proj.{kind}": f"attn_{'output' if x == 'o' else x}.{kind}"
       for x in "qkvo" for kind in ("weight", "bias")},
}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gpt_oss_folder(folder: Path, **sizes: Any) -> Path:
    """A folder with random weights, whose experts are in MXFP4."""
    config = {**find_architecture("GptOssForCausalLM").tiny_config(), "vocab_size": 259, "intermediate_size": 64,
              "num_attention_heads": 4, "num_hidden_layers": 2, **sizes}  # fmt: skip
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    make_transformers(config, folder)
    tensors, noise = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        size = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=noise, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, size, generator=noise, dtype=torch.uint8)
        tensors[f"{name}_bias"] = torch.randn(experts, rows, generator=noise) * 0.2
    save_file(tensors, folder / "model.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": QUANTIZED}))
    return folder


def in_ggml_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scale of each block, then its elements: those of the first half in the low halves of bytes."""
    elements = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    low, high = elements.split(16, dim=-1)
    return torch.cat((scales[..., None], low | (high << 4)), dim=-1).flatten(-2)


def file_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder by their names in a file; gate and up, whose rows alternate in the folder, are apart."""
    stored, found = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            block, part = f"blk.{layer[1]}", layer[2]
            if part in _NAMES:
                found[f"{block}.{_NAMES[part]}"] = tensor
            elif part == "mlp.experts.gate_up_proj_bias":
                for first, which in enumerate(("gate", "up")):
                    found[f"{block}.ffn_{which}_exps.bias"] = tensor[:, first::2].contiguous()
            elif part.endswith("_blocks"):
                whole = in_ggml_blocks(tensor, stored[name.replace("_blocks", "_scales")])
                pair = "gate_up" in part
                for first, which in enumerate(("gate", "up") if pair else ("down",)):
                    found[f"{block}.ffn_{which}_exps.weight"] = whole[:, first :: 1 + pair].contiguous()
            else:
                assert part.endswith("_scales"), name
        else:
            stem = name.removesuffix(".weight")
            found[f"{_TOP[stem]}.weight"] = tensor
    return found


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The family's keys."""
    rope = config["rope_parameters"]
    return {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"], "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"], "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }  # fmt: skip


def write_gpt_oss(
    folder: Path, path: Path, kind: Callable[[str], str] = lambda name: "F32", drop: str = "$", **more: Any
) -> Path:
    """The file of the gpt-oss in ``folder``.

    Args:
        folder: from ``gpt_oss_folder``.
        path: of the file.
        kind: how a matrix is stored that is no expert's.
        drop: a regular expression of keys and tensors that the file lacks.
        more: further keys, with ``_`` for each dot, and tensors by their names.
    """
    keys = keys_of(json.loads((folder / "config.json").read_text()))
    tensors = {name: tensor for name, tensor in file_tensors(folder).items() if not re.match(drop, name)}
    tensors |= {name: value for name, value in more.items() if isinstance(value, torch.Tensor)}
    keys |= {name: value for name, value in more.items() if not isinstance(value, torch.Tensor)}

    def form(name: str) -> str:
        if tensors[name].dtype == torch.uint8:
            return "MXFP4"
        return "F32" if name.endswith(".bias") or "ffn_gate_inp" in name else kind(name)

    return write_gguf(path, "gpt-oss", {k: v for k, v in keys.items() if not re.match(drop, k)}, tensors, form)
