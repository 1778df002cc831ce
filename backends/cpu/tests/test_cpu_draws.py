"""The CPU kernel of sampling draws from the exact distribution, as the reference does.

Penalties and biases have no kernel of this backend: their logits are the reference's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from distributions import DRAWS, FILTERS, LOGITS, PENALTIES, VOCABULARY, adjusted, adjusted_by, exact, fits
from test_cpu_kernels import built, reference

from evener_backend_cpu.device import CpuDevice


def counts(logits: torch.Tensor, **settings: Any) -> list[int]:
    """How often each id is drawn from logits [1, VOCABULARY]."""
    counter = torch.arange(DRAWS, dtype=torch.int32)
    columns = (
        torch.full((DRAWS,), settings.get("temperature", 1.0)),
        torch.full_like(counter, settings.get("top_k", 0)),
        torch.full((DRAWS,), settings.get("top_p", 1.0)),
        torch.full((DRAWS,), settings.get("min_p", 0.0)),
    )
    filters = bool(settings.keys() - {"temperature"})
    sample = built(CpuDevice(0, {}), "sample", {"vocab": VOCABULARY, "filters": filters})
    ids = sample(logits.expand(DRAWS, -1).contiguous(), *columns, counter, torch.full_like(counter, 12345))
    assert ids.dtype == torch.int32
    return torch.bincount(ids.long(), minlength=VOCABULARY).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_of_the_kernel_have_the_exact_distribution(settings: dict[str, Any]) -> None:
    found = counts(LOGITS[None], **settings)
    assert fits(found, exact(**settings))
    assert settings in ({}, {"top_k": 99}) or not fits(found, [p or 1e-9 for p in exact()])


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_draws_of_the_kernel_under_penalties_and_biases_have_the_exact_distribution(settings: dict[str, Any]) -> None:
    filters, by_hand = adjusted(settings)
    found = counts(adjusted_by(lambda op: reference(op, {"vocab": VOCABULARY}), settings), **filters)
    assert fits(found, exact(**filters, logits=by_hand))
    assert settings == {"bias": {4: -100.0}} or not fits(found, [p or 1e-9 for p in exact()])


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_of_the_kernel_of_allowed_tokens_have_the_exact_distribution(settings: dict[str, Any]) -> None:
    allowed = [0, 2, 3, 5, 8, 9, 11]
    mask = torch.tensor([[sum(1 << i for i in allowed)]], dtype=torch.int32)
    logits = built(CpuDevice(0, {}), "apply_mask", {"vocab": VOCABULARY})(LOGITS[None].clone(), mask)
    left = [x if i in allowed else -math.inf for i, x in enumerate(LOGITS.tolist())]
    assert fits(counts(logits, **settings), exact(**settings, logits=left))
