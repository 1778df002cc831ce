"""Random heads of EAGLE-3 in the published forms, for a vocabulary of 11 ids of which they keep 8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

IDS = "eagle_aux_hidden_state_layer_ids"


def write_head(folder: Path, model: str | Path, style: str = "published", **changes: Any) -> Path:
    """Write a random head for the model of a folder. Keys that are None are left out."""
    target = json.loads((Path(model) / "config.json").read_text())
    width = target["hidden_size"]
    shape = {
        "hidden_size": width, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "intermediate_size": 40, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "num_hidden_layers": 1,
        "max_position_embeddings": 64, "vocab_size": target["vocab_size"], "draft_vocab_size": 8,
        "target_hidden_size": width, **changes,
    }  # fmt: skip
    shape = {key: value for key, value in shape.items() if value is not None}
    ids, noise = shape.get(IDS, [0, 1, 2]), torch.Generator().manual_seed(7)

    def random(*size: int) -> torch.Tensor:
        return 0.3 * torch.randn(size, generator=noise)

    own, kept = shape["hidden_size"], shape.get("draft_vocab_size", shape["vocab_size"])
    layer = "layers.0" if style == "speculators" else "midlayer"
    chosen = torch.tensor([1, 2, 3, 5, 6, 8, 9, 10])
    tensors = {
        "fc.weight": random(own, len(ids) * shape["target_hidden_size"]), "norm.weight": 1 + random(own),
        "lm_head.weight": random(kept, own), "d2t": chosen - torch.arange(8), "t2d": torch.zeros(11, dtype=torch.bool),
        **{f"{layer}.{name}.weight": 1 + random(own)
           for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{layer}.self_attn.{name}_proj.weight": random(rows, 2 * own)
           for name, rows in (("q", 32), ("k", 16), ("v", 16))},
        f"{layer}.self_attn.o_proj.weight": random(own, 32),
        **{f"{layer}.mlp.{name}_proj.weight": random(40, own) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": random(own, 40),
    }  # fmt: skip
    if style == "speculators":
        tensors["embed_tokens.weight"] = random(shape["vocab_size"], own)
        outer = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", IDS)
        inner = {key: value for key, value in shape.items() if key not in outer}
        shape = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                 "transformer_layer_config": inner, **{key: shape[key] for key in outer if key in shape}}  # fmt: skip
    else:
        shape = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **shape}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
