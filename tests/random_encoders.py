"""Encoders of transformers with random weights, and texts for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from family_oracles import randomise

from evener_conformance.naive.model import find_architecture

#: One of one token, one that fills the context, and between; as many as run at a time, and more.
TEXTS = [[5], [7 * i % 190 + 3 for i in range(128)], [3, 4, 5, 9, 6], [7, 8, 3, 8, 9, 8, 4, 5, 9], [9, 9], [8] * 77]
FAMILIES = ("Bert", "DistilBert", "XLMRoberta", "Roberta", "ModernBert")


def make(folder: Path, architecture: str, **changes: Any) -> Any:
    """transformers' model of an architecture's tiny config, random and saved in ``folder``."""
    import transformers

    config = {**find_architecture(architecture).tiny_config(), "architectures": [architecture], **changes}
    made = transformers.AutoConfig.for_model(**config)
    model = cast("Any", getattr(transformers, architecture))(made).eval()
    randomise(model)
    noise = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight, 1, 0.2, noise)
    model.save_pretrained(folder)
    return model


def rows_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)
