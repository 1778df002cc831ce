"""Tiny models with random weights, adapters for them as PEFT saves them, and models into which an adapter is merged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from evener.contracts.declared import LinearWeight, StackedWeight, Weight
from evener.layers import Builder
from evener_conformance.naive.model import find_architecture

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_model(folder: Path, family: str = "Llama", changes: Mapping[str, Any] | None = None) -> Path:
    """A model of the family's tiny sizes with ``changes``, with random float32 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, draw = find_architecture(f"{family}ForCausalLM"), torch.Generator().manual_seed(0)
    config = {**kind.tiny_config(), **(changes or {})}
    build, tensors = Builder("float32", 64), {}
    kind(config, build)
    for item in build.weights:
        assert not isinstance(item, StackedWeight), "these models have no experts"
        if isinstance(item, LinearWeight):
            for part in item.parts:
                tensors[part.name] = torch.randn(part.rows, part.columns, generator=draw) / math.sqrt(part.columns)
        elif isinstance(item, Weight):
            rows = {part.name: part.rows for w in build.weights if isinstance(w, LinearWeight) for part in w.parts}
            for source in item.sources:
                shape = (rows.get(source.removesuffix("bias") + "weight", item.shape[0]), *item.shape[1:])
                table = len(shape) > 1
                tensors[source] = torch.randn(shape, generator=draw) * (1 if table else 0.1) + (0 if table else 1)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(
    folder: Path, model: Path, rank: int, targets: Sequence[str] = PROJECTIONS, seed: int = 1, alpha: float = 16.0,
    ranks: Mapping[str, int] | None = None, strength: float = 1.0, dtype: torch.dtype = torch.float32, **config: Any,
) -> Path:  # fmt: skip
    """An adapter of the model's layers whose names end in ``targets``; ``ranks``: other ranks of some of these."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        last = name.removesuffix(".weight").split(".")[-1]
        if last not in targets or ".layers." not in name or weight.dim() != 2:
            continue
        own, (rows, columns) = (ranks or {}).get(last, rank), weight.shape
        prefix = "base_model.model." + name.removesuffix("weight")
        down = torch.randn(own, columns, generator=draw) / math.sqrt(columns)
        up = torch.randn(rows, own, generator=draw) * strength / alpha * math.sqrt(own)
        tensors |= {f"{prefix}lora_A.weight": down.to(dtype), f"{prefix}lora_B.weight": up.to(dtype)}
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none",
             "use_rslora": False, "rank_pattern": dict(ranks or {}), "alpha_pattern": {}}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter added to its weights, by PEFT's formula."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    halves = load_file(adapter / "adapter_model.safetensors")
    for name, down in halves.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up, last, rank = halves[name.replace("lora_A", "lora_B")], module.split(".")[-1], down.shape[0]
        alpha = config["alpha_pattern"].get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        tensors[f"{module}.weight"] += scale * (up.double() @ down.double()).float()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder
