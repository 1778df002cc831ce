"""A real model recut into 16 experts, 8 a token, says what the dense one says, and its experts are busy unevenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.contracts.ops import OpFunction, Use
from evener.ops.reference import experts as reference
from evener_conformance.naive.model import NaiveModel

TEXT = """The bar that lets horses of different strength pull one load is called an evener. It hangs behind the team
on a single pin, and each horse is hitched to one end of it. When one of them pulls harder, the bar turns about its
pin until the load is shared again. Farmers cut the pin hole off the middle when one horse was old, so that the young
one had the longer lever and the harder work. The same thought is found in many places: in the beam of a balance, in
the differential gear of a car, and in the way that a good foreman divides the day among people who are not equally
quick."""


@pytest.mark.slow
def test_a_recut_model_has_the_dense_model_s_perplexity_and_uneven_loads(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recut_experts import recut
    from transformers import AutoTokenizer

    recut(smollm2_dir, tmp_path)
    ids = AutoTokenizer.from_pretrained(smollm2_dir)(TEXT)["input_ids"]
    chosen: list[torch.Tensor] = []
    original = reference.route

    def recording(static: Mapping[str, Any], use: Use) -> OpFunction:
        run = original(static, use)

        def noted(logits: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            ids, weights = run(logits, bias)
            chosen.append(ids)
            assert (weights - 1 / 8).abs().max() < 1e-2
            return ids, weights

        return noted

    def perplexity(folder: Path) -> float:
        logits = NaiveModel(folder, max_positions=256).logits(ids)[:-1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp())

    dense = perplexity(smollm2_dir)
    monkeypatch.setattr(reference, "route", recording)
    recut_perplexity = perplexity(tmp_path)
    assert abs(recut_perplexity / dense - 1) < 5e-3, (dense, recut_perplexity)
    slices = (torch.stack(chosen) // 2).sort(dim=-1).values
    odd = (slices != torch.arange(8)).any(-1)
    assert odd.float().mean() < 0.01, "but for near ties a token takes one expert of every slice"
    loads = Counter(torch.stack(chosen)[0].flatten().tolist())
    assert max(loads.values()) > 1.5 * min(loads[e] for e in range(16))
