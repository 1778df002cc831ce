"""The kernel for one query a request over long states on the host, and which steps it gets."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_host import Box, Pointer, on_host
from test_triton_prefill import group, step_of, tuning

from evener.contracts.device import DeviceCapabilities
from evener.engine.worker.geometry import Geometry, Group
from evener_kernels_triton import descriptor
from evener_kernels_triton.even import even_queries
from evener_kernels_triton.jit import even_attention as kernel
from evener_kernels_triton.plugin import evener_state_providers
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.tuning import MIN_EVEN_TOKENS, power_of_two

LINE = 8


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def attention_on_host(
    lengths: list[int], page: int, window: int, programs: int, n: int = 8, stages: int = 2, least: int = 1,
    heads: int = 6, d: int = 4 * LINE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the kernel computes, and what is right. Places that nobody wrote hold no numbers, and so does what follows a
    request's pages."""
    torch.manual_seed(len(lengths) + page + window)
    kv_heads = 2
    need = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(need)) + 1
    table = torch.zeros(len(lengths), max(need) + n // page + 1, dtype=torch.int32)
    for row, found in enumerate(pages.split(need)):
        table[row, : len(found)] = found
    pool = torch.full((sum(need) + 1, 2, kv_heads, page, d), torch.nan, dtype=torch.float16)
    query = torch.randn(len(lengths), heads, d, dtype=torch.float16)
    wanted = torch.zeros(len(lengths), heads, d)
    for row, length in enumerate(lengths):
        if not length:
            continue
        at = torch.arange(length)
        kv = torch.randn(2, kv_heads, length, d, dtype=torch.float16)
        first = max(0, length - window) if window else 0
        pool[table[row, at // page].long(), :, :, at % page] = kv.permute(2, 0, 1, 3)
        for column in range(first // page):  # pages before were given back
            pool[table[row, column]] = torch.nan
        k, v = kv[:, :, first:].float().repeat_interleave(heads // kv_heads, 1)
        weights = (torch.einsum("hd,hkd->hk", query[row].float(), k) * 0.3).softmax(-1)
        wanted[row] = torch.einsum("hk,hkd->hd", weights, v)
    members = heads // kv_heads
    out = torch.full_like(query, torch.nan)
    parts = torch.full((programs, 2, members, d), torch.nan)
    stats = torch.full((programs, 2, members, 2), torch.nan)
    arrived = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32)
    lines = pool.view(-1, d)
    box = [min(page, n), LINE]
    per_page, per_part = 2 * kv_heads * page, kv_heads * page
    count = len(lines) - per_part
    on_host(kernel, "even_kernel", LINE)(
        programs, Pointer(query.view(-1)), Box(lines[:count], box), Box(lines[per_part:], box), Pointer(out.view(-1)),
        Pointer(parts.view(-1)), Pointer(stats.view(-1)), Pointer(arrived), Pointer(table.view(-1)),
        Pointer(torch.tensor(lengths).int()), table.stride(0), len(lengths), per_page, per_page, count, count,
        query.stride(0), query.stride(1), 0.3 * 1.4426950408889634, HEADS=heads, KV_HEADS=kv_heads, PAGE=page,
        WINDOW=window, D=d, N=n, STAGES=stages, LEAST=least, MERGED=2, HIGH=power_of_two(members), OVERLAP=True,
    )  # fmt: skip
    assert not arrived.any(), "the next launch counts from 0"
    real = torch.tensor(lengths) > 0
    return out[real].float(), wanted[real]


@pytest.mark.parametrize(
    ("lengths", "page", "window", "programs", "n", "stages", "least"),
    [
        ([61], 4, 0, 5, 8, 2, 1), ([1], 4, 0, 3, 8, 2, 1), ([17, 0, 3, 90, 8], 4, 0, 7, 8, 3, 1),
        ([33, 40, 0], 16, 0, 4, 8, 2, 1), ([70, 9, 21], 4, 20, 4, 8, 2, 1), ([64, 16], 8, 16, 9, 16, 2, 3),
        ([50, 50], 2, 0, 2, 16, 2, 1), ([200], 1, 0, 1, 8, 2, 1), ([30] * 3, 4, 0, 30, 8, 2, 100),
    ],
)  # fmt: skip
def test_equal_parts_of_all_states(
    lengths: list[int], page: int, window: int, programs: int, n: int, stages: int, least: int
) -> None:
    got, wanted = attention_on_host(lengths, page, window, programs, n, stages, least)
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)


def test_more_requests_than_one_search_takes() -> None:
    got, wanted = attention_on_host([3] + [0] * 126 + [9, 0, 5, 17], 4, 0, 6)
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)


def captured(requests: int, longest: int) -> Any:
    return replace(step_of([1] * requests), captured=True, max_kv=longest)


def test_which_steps_it_gets() -> None:
    assert even_queries(tuning(), captured(1, 65536), *group()) is not None
    assert even_queries(tuning("overlap"), captured(8, 65536), *group()) is not None
    assert even_queries(tuning(), captured(1, 65535), *group()) is None, "short states"
    assert even_queries(replace(tuning(), even_from=65537), captured(1, 65536), *group()) is None
    assert even_queries(tuning(), captured(256, 65536), *group()) is None, "requests enough without parts"
    assert even_queries(tuning(), replace(captured(1, 65536), captured=False), *group()) is None
    assert even_queries(tuning(), captured(1, 65536), *group(kind="window")).window == 512


@pytest.mark.parametrize(
    ("requests", "changes", "lengths"),
    [
        (1, {}, (65535, 131072)), (31, {}, (65535, 131072)), (32, {}, (8191, 131072)), (33, {}, (131072,)),
        (7, {"d": 256}, (65535, 131072)), (8, {"d": 256}, (8191, 131072)), (8, {"kind": "window"}, (65535, 131072)),
        (16, {"d": 64}, (65535, 131072)), (17, {"d": 64}, (131072,)), (1, {"kind": "window"}, (65535, 131072)),
        (1, {"d": 96}, (131072,)), (1, {"softcap": 30.0}, (131072,)), (1, {"dtype": "float32"}, (131072,)),
    ],
)  # fmt: skip
def test_short_and_long_contexts_have_captures_of_their_own_where_both_kernels_serve_a_step(
    requests: int, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    provider, (spec, attention) = PagedState(tuning()), group(**changes)
    geometry = Geometry((Group(spec, attention, provider, ()),), 1, 32, 0)
    assert geometry.captured_lengths(requests, 131072, None) == lengths
    assert geometry.captured_lengths(requests, lengths[0], None) == (lengths[0],), "no context is long"
    assert geometry.captured_lengths(requests, 131072, 8) == (131072,), "the device holds few captures"
    metas = [provider.prepare(captured(requests, length), spec, attention, 32) for length in lengths]
    assert [meta.decode is not None and meta.decode.even is not None for meta in metas] == [False, True][: len(lengths)]


def test_the_key_is_the_length_from_which_contexts_have_the_other_capture() -> None:
    device = SimpleNamespace(capabilities=DeviceCapabilities(
        dtypes=frozenset({"bfloat16"}), features=frozenset({"units:132", f"shared:{227 << 10}", "warpgroups"})
    ))  # fmt: skip
    for options, limit in (({}, MIN_EVEN_TOKENS), ({"even_attention": 6000}, 6000)):
        paged = next(p for p in evener_state_providers(device, options) if isinstance(p, PagedState))  # type: ignore[arg-type]
        assert paged.capture_limits(*group(), 1) == (limit,)


@pytest.mark.parametrize(
    ("heads", "programs"), [(8, 128), (64, 128), (4, 132), (40, 132), (96, 132), (128, 128), (7, 126)]
)
def test_parts_end_with_heads_where_that_leaves_few_units_idle(heads: int, programs: int) -> None:
    assert tuning().even_programs(heads) == programs


@pytest.mark.parametrize(
    "changes",
    [{"d": 96}, {"kind": "chunk"}, {"dtype": "float32"}, {"softcap": 30.0}, {"sinks": True}, {"slopes": (0.5,) * 4}],
    ids=str,
)
def test_unsupported_attention_stays_with_the_kernel_with_splits(changes: dict[str, Any]) -> None:
    assert even_queries(tuning(), captured(1, 65536), *group(**changes)) is None


def test_pages_that_cannot_be_copied_stay_with_the_kernel_with_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, (spec, attention) = PagedState(tuning()), group()
    size = provider.bytes_per_block(spec, 32)
    meta = provider.prepare(captured(1, 65536), spec, attention, 32)
    seen: list[str] = []
    monkeypatch.setattr("evener_kernels_triton.state.attend_evenly", lambda *args: seen.append("evenly"))
    monkeypatch.setattr(type(meta.decode.launches[0]), "__call__", lambda *args: seen.append("splits"))
    for storage in (torch.zeros(3, size, dtype=torch.uint8), torch.zeros(3, size + 16, dtype=torch.uint8)[:, :size]):
        views = provider.bind(storage, spec, 32)
        provider.attend(views, meta, torch.zeros(1, 4, 128, dtype=torch.bfloat16))
    assert seen == ["evenly", "splits"]


def test_the_default_that_is_told_is_the_one_that_is_used() -> None:
    """The descriptor cannot ask ``tuning``, which imports torch."""
    assert descriptor.options["even_attention"].default == MIN_EVEN_TOKENS
