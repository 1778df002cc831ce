"""Latent attention by torch's flash attention, against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.ops.reference.latent import partial_attention
from evener.ops.reference.state import ReferenceState
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.latent import FlashPartialAttention, LatentState

HEADS, RANK, ROPE, BLOCK = 3, 48, 20, 16
#: Tokens that each request has, and tokens that it adds.
MIXED = [(0, 1), (700, 1), (16, 1), (40, 3)]


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(0, {})


def latent_state(dtype: str) -> tuple[StateSpec, AttentionSpec]:
    tensors = StateTensor("latent", (RANK,), dtype), StateTensor("rope", (ROPE,), dtype)
    return StateSpec("latent", tensors), AttentionSpec(HEADS, RANK + ROPE, 0.11, dtype=dtype)


def attended(provider: ReferenceState, requests: list[tuple[int, int]], dtype: str) -> list[torch.Tensor]:
    """What each request's new queries find. Tokens depend on the request's numbers alone; pages begin as NaN."""
    spec, attention = latent_state(dtype)
    counts = [-(-(before + now) // BLOCK) for before, now in requests]
    table = torch.zeros(len(requests), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(count) + 1 + sum(counts[:row])
    pool = torch.full((sum(counts) + 1, provider.bytes_per_block(spec, BLOCK)), 255, dtype=torch.uint8)
    views, kind, queries = provider.bind(pool, spec, BLOCK), getattr(torch, dtype), list[torch.Tensor]()

    def meta(before: list[int], now: list[int]) -> Any:
        at = [torch.arange(b, b + n) for b, n in zip(before, now, strict=True)]
        slots = [table[row, each // BLOCK] * BLOCK + each % BLOCK for row, each in enumerate(at)]
        ends = [b + n for b, n in zip(before, now, strict=True)]
        step = StateStep(
            tokens=sum(now), requests=len(now), max_query=max(now), max_kv=max(ends),
            query_start=torch.tensor([0, *now]).cumsum(0, dtype=torch.int32),
            kv_lens=torch.tensor(ends, dtype=torch.int32), positions=torch.cat(at).int(),
            slot_mapping=torch.cat(slots).int(), block_table=table, host_query_lens=now, host_kv_lens=ends,
        )  # fmt: skip
        return provider.prepare(step, spec, attention, BLOCK)

    rows = []
    for before, now in requests:
        generator = torch.Generator().manual_seed(before)
        rows.append(torch.randn(before + now, RANK + ROPE, generator=generator).to(kind))
        queries.append(torch.randn(now, HEADS, RANK + ROPE, generator=generator).to(kind))
    everything = meta([0] * len(requests), [sum(each) for each in requests])
    provider.write(views, everything, *torch.cat(rows).split([RANK, ROPE], dim=-1))
    found = provider.attend(views, meta(*map(list, zip(*requests, strict=True))), torch.cat(queries))
    return list(found.split([now for _, now in requests]))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_queries_over_latent_state_find_what_the_reference_finds(
    device: CpuDevice, dtype: str, tolerance: float
) -> None:
    got, want = attended(LatentState(device), MIXED, dtype), attended(ReferenceState(), MIXED, dtype)
    torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_finds_the_same_bits_alone_and_among_others(device: CpuDevice, dtype: str) -> None:
    together = attended(LatentState(device), MIXED, dtype)
    for request, found in zip(MIXED, together, strict=True):
        assert torch.equal(attended(LatentState(device), [request], dtype)[0], found)


@pytest.mark.parametrize("offset", [0, 70, 4, -3, -9, -400, 300])
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (16, 16), (12, 20)])
def test_a_piece_of_a_context_gives_what_the_reference_gives(
    device: CpuDevice, offset: int, dim: int, value_dim: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(n, 5, d, generator=generator) for n, d in ((90, dim), (75, dim), (75, value_dim)))
    static = {"heads": 5, "scale": dim**-0.5, "dtype": "float32"}
    call = OpCall("partial_attention", static, Bucket(1, 128), device.capabilities)
    kernel, nothing = FlashPartialAttention(device), Any
    assert kernel.supports(call) is None
    got = kernel.build(call)(query, key, value, offset)
    torch.testing.assert_close(got, partial_attention(static, nothing)(query, key, value, offset), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("change", [{"softcap": 5.0}, {"sinks": True}, {"slopes": (0.5,) * HEADS}])
def test_what_flash_attention_cannot_do_is_left_to_the_reference(device: CpuDevice, change: dict[str, Any]) -> None:
    spec, _ = latent_state("float32")
    attention = AttentionSpec(HEADS, RANK + ROPE, 0.1, **change)
    assert "without soft cap, slopes and sinks" in str(
        LatentState(device).supports(spec, attention, device.capabilities)
    )
