"""The provider "cpu.paged" against the reference provider: lengths in any mix, dirty memory, and company."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateStep, StateTensor
from evener.ops.reference.state import ReferenceState
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.state import PagedState

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass
class Case:
    """Requests of (tokens before, tokens in this step) and a geometry."""

    requests: list[tuple[int, int]]
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    value_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None
    block_size: int = 16
    dtype: str = "float32"
    int64: bool = False
    seed: int = 0
    tokens: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        kind = getattr(torch, self.dtype)
        for before, now in self.requests:
            shape = [(before + now, self.kv_heads, self.head_dim), (before + now, self.kv_heads, self.value_dim)]
            shape.append((before + now, self.heads, self.head_dim))
            self.tokens.append(tuple(torch.randn(s, generator=generator).to(kind) for s in shape))  # type: ignore[arg-type]
        self.spec = StateSpec(
            "window" if self.window else "full",
            (
                StateTensor("key", (self.kv_heads, self.head_dim), self.dtype),
                StateTensor("value", (self.kv_heads, self.value_dim), self.dtype),
            ),
            window=self.window,
        )
        self.attention = AttentionSpec(
            self.heads, self.head_dim, self.head_dim**-0.5, self.softcap, self.sinks, self.dtype, slopes=self.slopes
        )

    def sink_values(self) -> torch.Tensor | None:
        return torch.linspace(-1, 2, self.heads).to(getattr(torch, self.dtype)) if self.sinks else None

    def tables(self) -> tuple[torch.Tensor, int]:
        """Block tables with blocks in a scattered order, dead blocks 0, and the number of blocks."""
        counts = [-(-(b + n) // self.block_size) for b, n in self.requests]
        ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
        table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        start = 0
        for row, count in enumerate(counts):
            table[row, :count] = ids[start : start + count]
            start += count
        return table, sum(counts) + 1

    def step(self, table: torch.Tensor, before: list[int], now: list[int]) -> StateStep:
        slots, positions = [], []
        for row, (b, n) in enumerate(zip(before, now, strict=True)):
            at = torch.arange(b, b + n)
            positions.append(at)
            slots.append(table[row, at // self.block_size] * self.block_size + at % self.block_size)
        index = torch.int64 if self.int64 else torch.int32
        lengths = [b + n for b, n in zip(before, now, strict=True)]
        return StateStep(
            tokens=sum(now), requests=len(now), max_query=max(now), max_kv=max(lengths),
            query_start=torch.tensor([0, *torch.tensor(now).cumsum(0).tolist()], dtype=torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32),
            positions=torch.cat(positions).to(index), slot_mapping=torch.cat(slots).to(index),
            block_table=table, host_query_lens=now, host_kv_lens=lengths,
        )  # fmt: skip


def run(case: Case, provider: StateProvider, chunks: list[int] | None = None) -> tuple[torch.Tensor, Any]:
    """Write what came before, then this step's tokens, and attend; dead blocks of a window are forgotten between."""
    table, blocks = case.tables()
    pool = torch.full((blocks, provider.bytes_per_block(case.spec, case.block_size) + 64), 255, dtype=torch.uint8)
    views = provider.bind(pool, case.spec, case.block_size)
    zero = [0] * len(case.requests)
    before = [b for b, _ in case.requests]
    if sum(before):
        meta = provider.prepare(case.step(table, zero, before), case.spec, case.attention, case.block_size)
        keys, values = (torch.cat([t[i][:b] for t, b in zip(case.tokens, before, strict=True)]) for i in (0, 1))
        provider.write(views, meta, keys, values)
    if case.window:
        table = table.clone()
        for row, b in enumerate(before):
            dead = max(0, b - case.window + 1) // case.block_size
            pool[table[row, :dead].long()] = 255
            table[row, :dead] = 0
    now = [n for _, n in case.requests]
    meta = provider.prepare(case.step(table, before, now), case.spec, case.attention, case.block_size)
    pairs = list(zip(case.tokens, before, strict=True))
    keys, values, queries = (torch.cat([t[i][b:] for t, b in pairs]) for i in (0, 1, 2))
    provider.write(views, meta, keys, values)
    return provider.attend(views, meta, queries, case.sink_values()), views


CASES = [
    {"requests": [(0, 1)]},
    {"requests": [(0, 7), (3, 1), (300, 1), (40, 37), (17, 0), (255, 2)]},
    {"requests": [(1000, 1)]},
    {"requests": [(0, 130)], "int64": True, "block_size": 64},
    {"requests": [(5, 20), (600, 1), (31, 1)], "heads": 4, "kv_heads": 1, "head_dim": 256, "value_dim": 256},
    {"requests": [(700, 1), (200, 90), (0, 33)], "window": 100, "block_size": 32},
    {"requests": [(700, 1), (50, 60)], "window": 16},
    {"requests": [(90, 1), (0, 40)], "softcap": 5.0, "heads": 8, "kv_heads": 8, "head_dim": 80, "value_dim": 48},
    {
        "requests": [(400, 1), (90, 1), (0, 40)],
        "sinks": True,
        "heads": 12,
        "kv_heads": 2,
        "head_dim": 16,
        "value_dim": 32,
    },
    {
        "requests": [(700, 1), (90, 1), (20, 90)],
        "slopes": (0.84, 0.5, 0.25, 0.125, 0.0625, 0.004),
        "heads": 6,
        "kv_heads": 2,
        "window": 400,
    },
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_the_reference_on_pages_full_of_nan(
    device: CpuDevice, case: dict[str, Any], dtype: str
) -> None:
    made = Case(**case, dtype=dtype)
    provider = PagedState(device)
    assert provider.supports(made.spec, made.attention, device.capabilities) is None
    got, _ = run(made, provider)
    want, _ = run(Case(**case, dtype="float32", tokens=[]) if dtype == "float32" else made, ReferenceState())
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_is_invariant_to_batch_chunking_and_threads(
    device: CpuDevice, dtype: str, window: int | None
) -> None:
    provider = PagedState(device)
    company = Case(requests=[(70, 300), (700, 1), (0, 20)], dtype=dtype, window=window)
    together, _ = run(company, provider)
    for row, (before, now) in enumerate(company.requests):
        alone = Case(requests=[(before, now)], dtype=dtype, window=window)
        alone.tokens = [company.tokens[row]]
        threads, device.threads = device.threads, 1
        got, _ = run(alone, provider)
        device.threads = threads
        start = sum(n for _, n in company.requests[:row])
        assert torch.equal(got, together[start : start + now])
    last = Case(requests=[(369, 1)], dtype=dtype, window=window)
    last.tokens = [company.tokens[0]]
    got, _ = run(last, provider)
    assert torch.equal(got[0], together[299])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_survive_export_import_and_copy(device: CpuDevice, dtype: str) -> None:
    case = Case(requests=[(0, 64)], dtype=dtype, value_dim=32, block_size=32)
    provider = PagedState(device)
    _, views = run(case, provider)
    _, plain = run(case, ReferenceState())
    blocks = torch.tensor([2, 1])
    for got, want in zip(provider.export_blocks(views, blocks), plain, strict=True):
        assert torch.equal(got, want[blocks])
    fresh = provider.bind(torch.zeros_like(views.storage), case.spec, 32)
    provider.import_blocks(fresh, blocks, provider.export_blocks(views, blocks))
    provider.copy_blocks(fresh, torch.tensor([1]), torch.tensor([0]))
    for got, want in zip(provider.export_blocks(fresh, torch.tensor([1, 2, 0])), plain, strict=True):
        assert torch.equal(got, want[torch.tensor([1, 2, 1])])


def test_padding_tokens_get_zero_output(device: CpuDevice) -> None:
    case = Case(requests=[(0, 5)])
    provider = PagedState(device)
    table, blocks = case.tables()
    views = provider.bind(
        torch.zeros(blocks, provider.bytes_per_block(case.spec, 16), dtype=torch.uint8), case.spec, 16
    )
    step = case.step(table, [0], [5])
    padded = StateStep(
        **{**step.__dict__, "tokens": 8, "slot_mapping": torch.nn.functional.pad(step.slot_mapping, (0, 3))}
    )
    meta = provider.prepare(padded, case.spec, case.attention, 16)
    query, keys, values = (torch.randn(8, n, 64) for n in (9, 3, 3))
    provider.write(views, meta, keys, values)
    assert not provider.attend(views, meta, query)[5:].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "multiple of 16"),
        ({"dtype": "float16"}, "float32 or bfloat16"),
        ({"heads": 8}, "not a multiple"),
    ],
)
def test_unsupported_state_is_refused_with_the_reason(device: CpuDevice, change: dict[str, Any], reason: str) -> None:
    case = Case(requests=[(0, 1)], **change)
    refusal = PagedState(device).supports(case.spec, case.attention, device.capabilities)
    assert refusal is not None and reason in refusal
