"""Adapters (LoRA) of the model that is served, under the names of those that vLLM's tests download."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_RANK = 4
#: Of the values: small, so that an adapter changes answers a little.
_SCALE = 0.02


def named_adapter(flag: str) -> tuple[str, str]:
    """The name and the folder in a value of ``--lora-modules``: ``name=path``, or an object in JSON."""
    if flag.startswith("{"):
        found = json.loads(flag)
        return str(found["name"]), str(found["path"])
    name, _, path = flag.partition("=")
    return name, path


@functools.cache
def _downloads() -> Path:
    return Path(tempfile.mkdtemp())


def downloaded(repo: str) -> str:
    """The folder where a repository of the hub would be. Nothing is downloaded; ``write_adapter`` makes it."""
    return str(_downloads() / repo)


def write_adapter(folder: Path, config: dict[str, Any]) -> None:
    """Write an adapter in PEFT's format for the query projections of a model of ``config``, always the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rows = heads * (config.get("head_dim") or hidden // heads)
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        base = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{base}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=random) * _SCALE
        tensors[f"{base}.lora_B.weight"] = torch.randn(rows, _RANK, generator=random) * _SCALE
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described), "utf-8")
