"""The kernel for long queries on the host, and which steps it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_host import Box, Pointer, on_host

from evener.contracts.device import DeviceCapabilities
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener_kernels_triton.jit import prefill_attention as kernel
from evener_kernels_triton.prefill import long_queries, pool_lines
from evener_kernels_triton.primitives import rows_of
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.tuning import LongTile, Tuning

LINE = 8


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def attention_on_host(
    requests: list[tuple[int, int]], page: int, window: int, d: int = 2 * LINE, m: int = 8, n: int = 8, stages: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes, and what is right. ``requests``: new tokens, tokens before. Places that nobody wrote
    hold no numbers, and so does what follows a request's pages."""
    torch.manual_seed(len(requests) + page + window)
    heads, kv_heads = 4, 2
    counts, lengths = [c for c, _ in requests], [c + b for c, b in requests]
    need = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(need)) + 1
    table = torch.zeros(len(requests), max(need) + n // page + 1, dtype=torch.int32)
    for row, found in enumerate(pages.split(need)):
        table[row, : len(found)] = found
    pool = torch.full((sum(need) + 1, 2, kv_heads, page, d), torch.nan, dtype=torch.float16)
    query = torch.randn(sum(counts), heads, d, dtype=torch.float16)
    wanted = []
    for row, (count, before) in enumerate(requests):
        at = torch.arange(count + before)
        kv = torch.randn(2, kv_heads, count + before, d, dtype=torch.float16)
        first = max(0, before - window + 1) // page * page if window else 0  # pages before were given back
        pool[table[row, at // page].long(), :, :, at % page] = kv.permute(2, 0, 1, 3)
        for column in range(first // page):
            pool[table[row, column]] = torch.nan
        q = query[sum(counts[:row]) : sum(counts[: row + 1])]
        distance = torch.arange(before, before + count)[:, None] - at
        unseen = (distance < 0) | (distance >= (window or 1 << 30))
        k, v = kv.float().repeat_interleave(heads // kv_heads, 1)
        weights = (torch.einsum("qhd,hkd->hqk", q.float(), k) * 0.3).masked_fill(unseen, -torch.inf).softmax(-1)
        wanted.append(torch.einsum("hqk,hkd->qhd", weights, v))
    tile = LongTile(m, n, stages, 0)
    out = torch.full_like(query, torch.nan)
    lines = pool.view(-1, d)
    box = [min(page, n), LINE]
    start = torch.tensor([0, *counts]).cumsum(0).int()
    per_page, per_part = 2 * kv_heads * page, kv_heads * page
    count = len(lines) - per_part
    pieces = sum(-(-c // m) for c in counts) * heads
    taken = torch.zeros(1, dtype=torch.int32)
    on_host(kernel, "prefill_kernel", LINE)(
        min(5, pieces),
        Box(query.flatten(1), [m // 2, d]), Box(lines[:count], box), Box(lines[per_part:], box),
        Box(out.view(len(out), -1), [m // 2, d]), Pointer(out.view(-1)), Pointer(taken), Pointer(table.view(-1)),
        Pointer(start), Pointer(torch.tensor(lengths).int()), table.stride(0), len(requests), pieces, per_page,
        per_page, count, count, out.stride(0), 0.3 * 1.4426950408889634, HEADS=heads, KV_HEADS=kv_heads, PAGE=page,
        WINDOW=window, D=d, M=m, N=n, STAGES=tile.stages,
    )  # fmt: skip
    assert taken.item() == 0, "the next launch counts from 0"
    return out.float(), torch.cat(wanted)


@pytest.mark.parametrize(
    ("requests", "page", "window", "n", "stages"),
    [
        ([(1, 0), (9, 5), (2, 30), (16, 16)], 4, 0, 8, 2), ([(21, 0), (5, 40)], 4, 10, 8, 2),
        ([(3, 2)] * 5, 4, 3, 4, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ([(21, 0)], 4, 0, 8, 2), ([(12, 3), (8, 0)], 16, 0, 8, 2), ([(17, 33)], 2, 6, 16, 2),
            ([(24, 24)], 8, 16, 8, 4),
        )),
    ],
)  # fmt: skip
def test_long_queries_over_pages(requests: Any, page: int, window: int, n: int, stages: int) -> None:
    got, wanted = attention_on_host(requests, page, window, n=n, stages=stages)
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)


@pytest.mark.slow
def test_more_requests_than_one_search_takes() -> None:
    got, wanted = attention_on_host([(1 + i % 3, i % 5) for i in range(131)], 4, 0)
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)


def tuning(*more: str) -> Tuning:
    features = frozenset({"units:132", f"shared:{227 << 10}", "warpgroups", *more})
    return Tuning.of(DeviceCapabilities(dtypes=frozenset({"float32", "bfloat16"}), features=features))


def group(d: int = 128, kind: str = "full", dtype: str = "bfloat16", **how: Any) -> tuple[StateSpec, AttentionSpec]:
    tensors = tuple(StateTensor(name, (2, d), dtype) for name in ("key", "value"))
    spec = StateSpec(kind, tensors, window=None if kind == "full" else 512)
    return spec, AttentionSpec(4, d, 0.1, **{"dtype": dtype, **how})


def step_of(counts: list[int]) -> StateStep:
    ints = torch.zeros(sum(counts), dtype=torch.int32)
    start = torch.tensor([0, *counts]).cumsum(0).int()
    return StateStep(
        sum(counts), len(counts), max(counts), 4096, start, ints[: len(counts)], ints, ints,
        torch.zeros(len(counts), 128).int(), counts, [4096] * len(counts),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "before"), [([2048], 0), ([1, 1, 1, 2048], 3), ([500, 300], 0), ([100, 99], None), ([1, 9, 9], None)]
)
def test_decoding_requests_are_served_apart_and_short_queries_by_the_kernel_for_any_mix(
    counts: list[int], before: int | None
) -> None:
    found = long_queries(tuning(), step_of(counts), *group())
    assert (found and found.before) == before
    if found is not None:
        assert found.step.tokens == sum(counts) - found.before
        assert found.step.query_start.tolist()[0] == 0


@pytest.mark.parametrize(
    "changes",
    [{"d": 96}, {"kind": "chunk"}, {"dtype": "float32"}, {"softcap": 30.0}, {"sinks": True}, {"slopes": (0.5,) * 4}],
    ids=str,
)
def test_unsupported_attention_stays_with_the_kernel_for_any_mix(changes: dict[str, Any]) -> None:
    assert long_queries(tuning(), step_of([4096]), *group()) is not None
    assert long_queries(tuning(), step_of([4096]), *group(**changes)) is None


def test_other_devices_stay_with_the_kernel_for_any_mix() -> None:
    plain = Tuning.of(DeviceCapabilities(dtypes=frozenset({"bfloat16"}), features=frozenset({f"shared:{227 << 10}"})))
    small = Tuning.of(DeviceCapabilities(dtypes=frozenset({"bfloat16"}), features=frozenset({"warpgroups"})))
    assert long_queries(plain, step_of([4096]), *group()) is None
    assert long_queries(small, step_of([4096]), *group()) is None


def test_pages_that_do_not_begin_at_a_line_are_not_copied() -> None:
    tile = 128
    storage = torch.zeros(3, 2 * 2 * 32 * 64 + 8, dtype=torch.bfloat16)
    part = storage[:, : 2 * 32 * 64].unflatten(1, (2, 32, 64))
    assert pool_lines(part, tile) is None
    assert pool_lines(part.contiguous(), tile) is not None


def test_a_step_is_split_between_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, (spec, attention) = PagedState(tuning()), group()
    views = provider.bind(torch.zeros(3, provider.bytes_per_block(spec, 32), dtype=torch.uint8), spec, 32)
    meta = provider.prepare(step_of([1, 1, 1024]), spec, attention, 32)
    assert meta.long is not None and meta.decode is not None and meta.decode.grid[0] == 2
    seen: list[Any] = []
    monkeypatch.setattr(provider, "_decode", lambda *args: seen.append(("decode",)))
    monkeypatch.setattr(provider, "_mixed", lambda *args: seen.append(("mixed",)))
    monkeypatch.setattr(
        "evener_kernels_triton.state.attend_long",
        lambda long, keys, values, page, kv_heads, query, out, taken: seen.append(("long", len(query), len(out))),
    )
    provider.attend(views, meta, torch.zeros(1026, 4, 128, dtype=torch.bfloat16))
    assert seen == [("decode",), ("long", 1024, 1024)]
    seen.clear()
    apart = torch.zeros(1026, 128, 4, dtype=torch.bfloat16).transpose(1, 2)
    assert rows_of(apart).stride(1) == 128, "copied, so that copies can read it"
    wide = torch.zeros(1026, 4, 256, dtype=torch.bfloat16)[:, :, :128]
    provider.attend(views, meta, wide)
    assert seen == [("mixed",)]
