"""Encoders of texts equal transformers': vectors, scores of pairs, texts alone and in company."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from family_oracles import randomise

from evener import LLM
from evener_conformance.naive.model import find_architecture

SMALL = {"dtype": "float32", "infer.max_reqs": 4, "infer.threads": 1}
#: One of one token, one that fills the context, and between; as many as run at a time, and more.
TEXTS = [[5], [7 * i % 190 + 3 for i in range(128)], [3, 4, 5, 9, 6], [7, 8, 3, 8, 9, 8, 4, 5, 9], [9, 9], [8] * 77]
FAMILIES = ("Bert", "DistilBert", "XLMRoberta", "Roberta", "ModernBert")
POOLED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "last": lambda rows: rows[-1],
}  # fmt: skip


def make(folder: Path, architecture: str, **changes: Any) -> Any:
    """transformers' model of an architecture's tiny config, random and saved in ``folder``."""
    import transformers

    config = {**find_architecture(architecture).tiny_config(), "architectures": [architecture], **changes}
    made = transformers.AutoConfig.for_model(**config)
    model = cast("Any", getattr(transformers, architecture))(made).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def rows_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_transformers_last_rows_pooled(family: str, pooling: str, tmp_path: Path) -> None:
    model = make(tmp_path, f"{family}Model")
    with LLM(tmp_path, **SMALL, **{"infer.pooling": pooling}) as llm:
        found = llm.embed(TEXTS)
    for each, ids in zip(found, TEXTS, strict=True):
        wanted = unit(POOLED[pooling](rows_of(model, ids)))
        torch.testing.assert_close(torch.tensor(each.vector), wanted, atol=3e-6, rtol=1e-4)
        assert each.num_cached_tokens == 0
