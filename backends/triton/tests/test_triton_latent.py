"""Attention of one request over latents: which parts it is split into, and what their kernels compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.contracts.weights import LatentWeights
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.latent import _from_latent_space
from evener_kernels_triton.latent_state import LatentState
from evener_kernels_triton.tuning import MAX_FEW_LATENT_SPLITS, MAX_LATENT_SPLITS, LatentTile, Tuning

HEADS, NOPE, VALUE, RANK, ROPE, PAGE = 5, 7, 24, 24, 10, 16
LARGE = Tuning(132, 227 << 10, False)
SPEC = StateSpec("latent", (StateTensor("latent", (RANK,), "float32"), StateTensor("rope", (ROPE,), "float32")))
HOW = AttentionSpec(HEADS, RANK + ROPE, 0.2, dtype="float32")


def step_of(lengths: list[int], longest: int) -> StateStep:
    """One new token for each of these requests, whose pages are in no order; captured for up to ``longest`` tokens."""
    count, each = len(lengths), -(-longest // PAGE)
    table = torch.randperm(count * each, generator=torch.Generator().manual_seed(3)).int().view(count, each)
    ints = torch.arange(count + 1, dtype=torch.int32)
    return StateStep(
        count, count, 1, longest, ints, torch.tensor(lengths).int(), ints[:-1], ints[:-1], table, [1] * count, lengths
    )


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.mark.parametrize("early", [False, True], ids=["waits", "early"])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 130, 300, 1000, 1024, 1025, 1100])
def test_one_request_is_attended_to_at_every_length(length: int, early: bool) -> None:
    provider, noise = LatentState(LARGE), torch.Generator().manual_seed(length)
    step = step_of([length], 1100)
    views = provider.bind(torch.zeros(step.block_table.numel(), PAGE * SPEC.nbytes, dtype=torch.uint8), SPEC, PAGE)
    views.rows.fill_(torch.nan)  # what was not written must not be read
    at = torch.arange(length)
    state = torch.randn(length, RANK + ROPE, generator=noise)
    views.rows[step.block_table[0, at // PAGE].long(), at % PAGE] = state
    query = torch.randn(1, HEADS, RANK + ROPE, generator=noise)
    meta = provider.prepare(step, SPEC, HOW, PAGE)
    found, parts = provider.attend_parts(views, meta, query, early)
    assert parts is not None and parts.splits == MAX_FEW_LATENT_SPLITS
    want = (query[0] @ state.T * HOW.scale).softmax(-1) @ state[:, :RANK]
    torch.testing.assert_close(provider.merge(views, meta, parts, found)[0], want, rtol=1e-4, atol=1e-5)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=noise)
    w: Any = SimpleNamespace(heads=weight)
    static = {"heads": HEADS, "nope_dim": NOPE, "value_dim": VALUE, "rank": RANK, "dtype": "float32"}
    leave = _from_latent_space(LARGE, OpCall("", static, Bucket(1, 1), HostDevice(0).capabilities))
    values = torch.empty(1, HEADS * VALUE)
    weights: LatentWeights = w
    leave(found, parts, weights, meta, values)
    right = torch.einsum("hr,hvr->hv", want, weight.view(HEADS, NOPE + VALUE, RANK)[:, NOPE:])
    torch.testing.assert_close(values.view(HEADS, VALUE), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("requests", "longest", "splits"),
    [(1, 1, 1), (1, 16, 1), (1, 17, 2), (1, 130, 16), (1, 1000, 64), (1, 1 << 17, 64), (2, 4096, 32), (3, 4096, 16),
     (4, 4096, 16), (8, 4096, 8), (16, 4096, 8), (64, 4096, 4), (300, 4096, 1)],
)  # fmt: skip
def test_a_few_requests_share_the_limit_of_splits(requests: int, longest: int, splits: int) -> None:
    how = AttentionSpec(16, 576, 0.1, dtype="bfloat16")
    spec = StateSpec("latent", (StateTensor("latent", (512,), "bfloat16"), StateTensor("rope", (64,), "bfloat16")))
    meta = LatentState(LARGE).prepare(step_of([1] * requests, longest), spec, how, PAGE)
    assert meta.splits == splits
    assert meta.one == (requests == 1)
    assert meta.splits * requests <= max(MAX_FEW_LATENT_SPLITS, MAX_LATENT_SPLITS * requests)


def test_tiles_of_many_heads_are_too_large_for_registers() -> None:
    provider, step = LatentState(LARGE), step_of([40], 2048)
    spec = StateSpec("latent", (StateTensor("latent", (512,), "bfloat16"), StateTensor("rope", (64,), "bfloat16")))
    many = provider.prepare(step, spec, AttentionSpec(128, 576, 0.1, dtype="bfloat16"), PAGE)
    assert (many.one, many.splits, many.tile) == (False, 64, LatentTile(64, 32, 8, 2))
    few = provider.prepare(step, spec, AttentionSpec(16, 576, 0.1, dtype="bfloat16"), PAGE)
    assert (few.one, few.splits, few.tile) == (True, 64, LatentTile(16, 16, 8, 1))
