"""What the tests of logits against transformers share."""

from __future__ import annotations

from typing import Any

import torch

from evener.testing.naive import NaiveModel


def prompt(vocab: int, length: int = 41) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def assert_equal_logits(ours: NaiveModel, theirs: torch.Tensor, ids: list[int]) -> None:
    assert theirs.std() > 0.5, "the model is too flat to show a difference"
    for chunk in (None, 7, 1):
        torch.testing.assert_close(ours.logits(ids, chunk), theirs, atol=1e-4, rtol=1e-4)
