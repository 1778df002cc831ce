"""Random weights so large that whatever a token reads shows in the next one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from evener.contracts.declared import LinearWeight, StackedWeight, Weight
from evener_conformance.naive.model import NaiveModel


def write_lively(folder: str | Path) -> None:
    """Write ``model.safetensors`` for the ``config.json`` of a folder: those of heads and predicting layers too."""
    shape = json.loads((Path(folder) / "config.json").read_text())
    noise, tensors = torch.Generator().manual_seed(3), {}
    for weight in NaiveModel(shape, predicts=True).build.weights:
        if isinstance(weight, StackedWeight):
            sizes = {part.name: (part.rows, part.columns) for part in weight.parts}
            for name, size in ((n.format(e), s) for n, s in sizes.items() for e in range(weight.experts)):
                tensors[name] = 0.25 * torch.randn(size, generator=noise)
        elif isinstance(weight, LinearWeight):
            for part in weight.parts:
                tensors[part.name] = 0.25 * torch.randn(part.rows, part.columns, generator=noise)
        elif isinstance(weight, Weight) and len(weight.shape) == 1 and len(weight.sources) == 1:
            middle = {"ones": 1.0}.get(weight.dummy, 0.0)
            tensors[weight.name] = middle + 0.2 * torch.randn(weight.shape, generator=noise)
        elif isinstance(weight, Weight):
            tensors[weight.name] = 0.25 * torch.randn(weight.shape, generator=noise)
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
