"""The Triton kernels of sampling draw from the exact distribution: they draw what the reference draws.

The interpreter is too slow for the 100,000 draws that show the distribution of the reference (``test_sampling.py`` of
the core). The noise is a function of seed, position and id, so draw for draw the kernel must give the reference's ids.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from distributions import FILTERS, LOGITS, PENALTIES, VOCABULARY, adjusted, adjusted_by, exact, fits
from interpreted import host_kernels

from evener.contracts.ops import Bucket, OpCall
from evener.ops.parts import load_reference
from evener.ops.schemas import BUILTIN
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.jit import sampling

#: The interpreter takes milliseconds for each. With so many, chi-square alone finds an error of a tenth in the share of
#: a likely token.
DRAWS = 2000
ALLOWED = [0, 2, 3, 5, 8, 9, 11]


def kernel(op: str, **static: Any) -> Any:
    found = next(k for k in host_kernels(composite=False) if k.op == op)
    return found.build(OpCall(op, {"vocab": VOCABULARY, **static}, Bucket(1, DRAWS), HostDevice(0).capabilities))


def reference(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    schema = next(schema for schema in BUILTIN if schema.name == "sample")
    return load_reference(schema)({"vocab": VOCABULARY, "filters": True}, None)(logits, *columns)  # type: ignore[no-any-return]


@pytest.fixture
def searches(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """All rows of a launch have the same logits and filters, so what a search finds for one holds for all. It is made
    once: it takes the interpreter tens of milliseconds. Returns what was found."""
    known: dict[Any, Any] = {}

    def once(name: str, search: Any) -> Any:
        def found(line: Any, *args: Any, **rest: Any) -> Any:
            given = [x.handle.data.item() if hasattr(x, "handle") else getattr(x, "value", x) for x in args]
            key = name, *given, *rest.values()
            if key not in known:
                known[key] = search(line, *args, **rest)
            return known[key]

        return found

    for name in ("_bisect_bound", "_sum_above"):
        monkeypatch.setattr(sampling, name, once(name, getattr(sampling, name)))
    return known


def counts(logits: torch.Tensor, draws: int, **settings: Any) -> list[int]:
    """How often each id is drawn from logits [1, VOCABULARY]."""
    counter = torch.arange(draws, dtype=torch.int32)
    columns = (
        torch.full((draws,), settings.get("temperature", 1.0)), torch.full_like(counter, settings.get("top_k", 0)),
        torch.full((draws,), settings.get("top_p", 1.0)), torch.full((draws,), settings.get("min_p", 0.0)),
    )  # fmt: skip
    sample = kernel("sample", filters=bool(settings.keys() - {"temperature"}))
    ids = sample(logits.expand(draws, -1), *columns, counter, torch.full_like(counter, 12345))
    assert ids.dtype == torch.int32 and ids.shape == (draws,)
    expected = reference(logits.expand(draws, -1), *columns, counter, torch.full_like(counter, 12345))
    assert torch.equal(ids, expected), "the kernel draws what the reference draws"
    return torch.bincount(ids.long(), minlength=VOCABULARY).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("settings", FILTERS[:-1], ids=str)
def test_draws_under_each_filter_have_the_exact_distribution(settings: dict[str, Any], searches: Any) -> None:
    found = counts(LOGITS[None], DRAWS, **settings)
    assert fits(found, exact(**settings))
    assert settings in ({}, {"top_k": 99}) or not fits(found, [p or 1e-9 for p in exact()])
    # Those of the best and of the worst score alone find nothing to search for.
    assert bool(searches) == bool(settings.keys() & {"top_k", "top_p"} and settings != {"top_k": 99})


@pytest.mark.slow
@pytest.mark.parametrize("settings", PENALTIES[:-1], ids=str)
def test_draws_under_each_penalty_and_bias_have_the_exact_distribution(settings: dict[str, Any], searches: Any) -> None:
    filters, by_hand = adjusted(settings)
    found = counts(adjusted_by(kernel, settings), DRAWS, **filters)
    assert fits(found, exact(**filters, logits=by_hand))
    assert settings == {"bias": {4: -100.0}} or not fits(found, [p or 1e-9 for p in exact()])


@pytest.mark.slow
def test_draws_under_all_filters_penalties_and_biases_have_the_exact_distribution(searches: Any) -> None:
    filters, by_hand = adjusted(PENALTIES[-1])
    found = counts(adjusted_by(kernel, PENALTIES[-1]), DRAWS // 2, **filters)
    assert fits(found, exact(**filters, logits=by_hand))
    assert not fits(found, [p or 1e-9 for p in exact()])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, FILTERS[-1]], ids=["free", "filtered"])
def test_draws_of_allowed_tokens_have_the_exact_distribution(settings: dict[str, Any], searches: Any) -> None:
    mask = torch.tensor([[sum(1 << i for i in ALLOWED)]], dtype=torch.int32)
    logits = kernel("apply_mask")(LOGITS[None], mask)
    left = [x if i in ALLOWED else -math.inf for i, x in enumerate(LOGITS.tolist())]
    assert fits(counts(logits, DRAWS // 2, **settings), exact(**settings, logits=left))
