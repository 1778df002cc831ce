"""The CPU kernel of sampling draws from the exact distribution, as the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributions import DRAWS, FILTERS, LOGITS, VOCABULARY, exact, fits
from test_cpu_kernels import built

from evener_backend_cpu.device import CpuDevice


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_of_the_kernel_have_the_exact_distribution(settings: dict[str, Any]) -> None:
    counter = torch.arange(DRAWS, dtype=torch.int32)
    columns = (
        torch.full((DRAWS,), settings.get("temperature", 1.0)),
        torch.full_like(counter, settings.get("top_k", 0)),
        torch.full((DRAWS,), settings.get("top_p", 1.0)),
        torch.full((DRAWS,), settings.get("min_p", 0.0)),
    )
    filters = bool(settings.keys() - {"temperature"})
    sample = built(CpuDevice(0, {}), "sample", {"vocab": VOCABULARY, "filters": filters})
    ids = sample(LOGITS.expand(DRAWS, -1).contiguous(), *columns, counter, torch.full_like(counter, 12345))
    assert ids.dtype == torch.int32
    counts = torch.bincount(ids.long(), minlength=VOCABULARY).tolist()
    assert fits(counts, exact(**settings))
    assert settings in ({}, {"top_k": 99}) or not fits(counts, [p or 1e-9 for p in exact()])
