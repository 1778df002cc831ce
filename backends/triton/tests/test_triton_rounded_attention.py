"""Attention of decode steps that rounds its own result, under Triton's interpreter: the bits of attention as it is and
``round_rows`` after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from interpreted import every_access_checked, host_states, schemas
from test_triton_rounded import able_device, able_kernels

from evener.contracts.quant import Rounding
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family
from evener_kernels_triton import rounded as module
from evener_kernels_triton import state as provider_module
from evener_kernels_triton.rounded import RoundedRows, round_rows
from evener_kernels_triton.state import PagedMeta, PagedState, PagedViews
from evener_kernels_triton.stored import Form, StoredMatrix
from evener_kernels_triton.tuning import Tuning

#: So few units that no request is split, and so many that all are.
ONE, MANY = Tuning(1, 48 << 10, False), Tuning(132, 48 << 10, False)
PAGE = 16
BLOCKS = Rounding("float8_e4m3fn", 128)
LENGTHS = (300, 5, 1, 131)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def weight(columns: int, how: Rounding | None) -> StoredMatrix:
    """A matrix without values: its columns and how activations are rounded count alone."""
    kind = "int8" if how is not None and how.storage == "int8" else "e4m3"
    fixed = torch.full((1,), 0.02) if how is not None and how.group < 0 else None
    return StoredMatrix(torch.empty(16, columns, dtype=torch.uint8), torch.ones(1, 1), Form(kind, 128, 128), how, fixed)


@dataclass
class Step:
    """A provider with the state of some requests, and queries for it."""

    provider: PagedState
    views: PagedViews
    meta: PagedMeta
    query: torch.Tensor
    sinks: torch.Tensor | None

    def rounded(self, how: Rounding | None) -> RoundedRows | None:
        heads, d = self.query.shape[1], self.views.value_dim
        return self.provider.attend_rounded(self.views, self.meta, self.query, self.sinks, weight(heads * d, how))

    def exact(self) -> torch.Tensor:
        return self.provider.attend(self.views, self.meta, self.query, self.sinks).flatten(1)


def decode(
    heads: tuple[int, int, int], tuning: Tuning = ONE, lengths: tuple[int, ...] = LENGTHS, dtype: str = "bfloat16",
    stored: str = "", window: int | None = None, sinks: bool = False, counts: tuple[int, ...] = (), **more: Any,
) -> Step:  # fmt: skip
    """A step of one token a request, or of ``counts``. What nobody wrote is no number."""
    count, kv_heads, d = heads
    draw = torch.Generator().manual_seed(sum(lengths) + count)
    tensors = tuple(
        StateTensor(name, (kv_heads, d), *((stored, dtype) if stored else (dtype,))) for name in ("key", "value")
    )
    spec = StateSpec("window" if window else "full", tensors, window=window)
    attention = AttentionSpec(count, d, d**-0.5, dtype=dtype, sinks=sinks)
    provider = PagedState(tuning)
    counts = counts or (1,) * len(lengths)
    need = [-(-n // PAGE) for n in lengths]
    table = torch.zeros(len(lengths), max(need, default=0) + 1, dtype=torch.int32)
    for row, found in enumerate((torch.randperm(sum(need), generator=draw) + 1).int().split(need)):
        table[row, : len(found)] = found
    storage = torch.full((sum(need) + 1, spec.nbytes * PAGE), 0xFF, dtype=torch.uint8)
    scales = [torch.linspace(0.01, 0.03, kv_heads), torch.linspace(0.02, 0.05, kv_heads)]
    bound = provider.bind_scaled(storage, spec, PAGE, scales) if stored else provider.bind(storage, spec, PAGE)

    def step_of(new: tuple[int, ...]) -> StateStep:
        at = [(r, p) for r, (n, c) in enumerate(zip(lengths, new, strict=True)) for p in range(n - c, n)]
        slots = [int(table[r, p // PAGE]) * PAGE + p % PAGE for r, p in at]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        return StateStep(
            tokens=len(at), requests=len(lengths), max_query=max(new, default=0), max_kv=max(lengths, default=0),
            query_start=starts, kv_lens=torch.tensor(lengths).int(), positions=torch.tensor([p for _, p in at]).int(),
            slot_mapping=torch.tensor(slots).int(), block_table=table, host_query_lens=list(new),
            host_kv_lens=list(lengths), **more,
        )  # fmt: skip

    whole, kind = step_of(lengths), getattr(torch, dtype)
    values = [torch.randn(whole.tokens, kv_heads, d, generator=draw).to(kind) for _ in range(2)]
    provider.write(bound, provider.prepare(whole, spec, attention, PAGE), *values)
    step = step_of(counts)
    query = torch.randn(step.tokens, count, d, generator=draw).to(kind)
    given = torch.randn(count, generator=draw) if sinks else None
    return Step(provider, bound, provider.prepare(step, spec, attention, PAGE), query, given)


def assert_same_bits(step: Step, how: Rounding) -> RoundedRows:
    """Rounded in the launch of attention as by a launch of its own."""
    with every_access_checked() as programs:
        got = step.rounded(how)
    assert set(programs) == {"decode_kernel"} and got is not None
    exact = step.exact()
    want = round_rows(step.provider._tuning, exact, weight(exact.shape[1], how))
    tokens = want.tokens
    assert (got.group, got.tokens, got.elements.shape) == (want.group, tokens, want.elements.shape)
    assert got.scales.shape == want.scales.shape and got.elements.dtype == want.elements.dtype
    assert torch.equal(got.elements[:tokens].view(torch.uint8), want.elements[:tokens].view(torch.uint8))
    assert torch.equal(got.scales[:, :tokens], want.scales[:, :tokens]) and bool(
        want.scales[:, :tokens].isfinite().all()
    )
    return got


@pytest.mark.parametrize("tuning", [ONE, MANY], ids=["one split", "splits"])
@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 4, 128), (3, 1, 128), (8, 4, 64), (4, 1, 32), (2, 1, 256)], ids=str)
def test_the_result_has_the_bits_of_attention_and_rounding_after_it(
    heads: tuple[int, int, int], tuning: Tuning
) -> None:
    """Query heads, key heads, numbers of a head: a group is one head, several, or half of one."""
    step = decode(heads, tuning)
    assert step.meta.decode is not None and (step.meta.decode.grid[2] > 1) == (tuning is MANY)
    assert_same_bits(step, BLOCKS)


@pytest.mark.parametrize(
    ("how", "heads", "more"),
    [
        (Rounding("float8_e4m3fn", 32), (4, 2, 64), {}),
        (Rounding("float8_e4m3fn", 64), (8, 2, 32), {"tuning": MANY}),
        (Rounding("int8", 128), (4, 2, 128), {"tuning": MANY}),
        (BLOCKS, (80, 1, 32), {"lengths": (40, 3)}),  # the second tile of heads is torn
        (BLOCKS, (80, 1, 32), {"lengths": (200,), "tuning": MANY}),
        (BLOCKS, (4, 2, 128), {"dtype": "float32"}),
        (BLOCKS, (4, 2, 128), {"dtype": "float16", "sinks": True}),
        (BLOCKS, (4, 2, 128), {"window": 100, "tuning": MANY, "sinks": True}),
        (BLOCKS, (4, 2, 128), {"stored": "float8_e4m3fn", "tuning": MANY}),
        (BLOCKS, (4, 2, 128), {"stored": "int8"}),
    ],
    ids=str,
)
def test_so_it_has_with_other_groups_and_other_state(how: Rounding, heads: Any, more: dict[str, Any]) -> None:
    assert_same_bits(decode(heads, **more), how)


def test_one_group_may_be_the_whole_token() -> None:
    step = decode((4, 1, 32))
    assert assert_same_bits(step, BLOCKS).group == 0


def test_there_is_room_for_as_many_rows_as_the_library_takes() -> None:
    tuning = replace(ONE, scaled_blocks=True)
    step = decode((4, 2, 128), tuning)
    got = assert_same_bits(step, BLOCKS)
    assert got.elements.shape == (16, 512) and got.scales.shape == (4, 16) and got.tokens == len(LENGTHS)


@pytest.mark.parametrize(
    ("how", "heads"),
    [
        (None, (4, 2, 128)),
        (Rounding("float8_e4m3fn"), (4, 2, 128)),  # a scale for all heads
        (Rounding("float8_e4m3fn", -1), (4, 2, 128)),
        (Rounding("float8_e4m3fn", 128), (6, 2, 64)),  # a group of two key heads
        (Rounding("float8_e4m3fn", 32), (4, 2, 96)),  # padded
        (Rounding("float8_e4m3fn", 1024), (4, 2, 128)),
    ],
    ids=str,
)
def test_groups_that_no_program_has_whole_are_left_to_a_launch_of_their_own(how: Rounding | None, heads: Any) -> None:
    with every_access_checked() as programs:
        step = decode(heads, lengths=(20, 3))
        programs.clear()
        assert step.rounded(how) is None
    assert not programs


def test_steps_of_other_kernels_are_left_to_a_launch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode((4, 2, 128), lengths=(20, 3), counts=(4, 3)).rounded(BLOCKS) is None, "a prompt"
    assert decode((4, 2, 128), lengths=(20, 3), counts=(1, 3)).rounded(BLOCKS) is None, "a mixed step"
    plain = decode((4, 2, 128), lengths=(20, 3))
    assert replace(plain, query=plain.query[:0]).rounded(BLOCKS) is None, "no tokens"
    other: Any = object()
    assert replace(plain, meta=replace(plain.meta, long=other)).rounded(BLOCKS) is None, "beside long queries"
    assert plain.rounded(BLOCKS) is not None
    monkeypatch.setattr(provider_module, "_evenly", lambda views, decode: (other, other))
    assert plain.rounded(BLOCKS) is None, "in even parts"


FAMILY = Family(
    "rounding", AttentionConfig(heads=8, kv_heads=2, head_dim=64, rotary=RotaryConfig(64), qk_norm=True, o_bias=True),
    MLPConfig(inner=128), hidden=256, storage="e4m3 by block, x by 128",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_of_a_layer_has_a_launch_less_and_the_same_numbers(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_TOKENS", 1)
    device, found = able_device(), Counter[str]()
    kernels = able_kernels(device, "linear", "attention_block", "mlp_block")
    run = interpreter.GridExecutor.__call__

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    def launches_and_results() -> tuple[list[Counter[str]], list[torch.Tensor]]:
        model = TinyModel(device, dtype, FAMILY, kernels, host_states()[0], list(schemas().values()))
        seen, results, noise = [], [], torch.Generator().manual_seed(5)
        for before, counts in (((0, 0), (17, 5)), ((17, 5), (1, 1)), ((18, 6), (2, 1))):
            found.clear()
            x = torch.randn(sum(counts), FAMILY.hidden, generator=noise)
            results += model.step(x, before, counts)
            seen.append(found.copy())
        return seen, results

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", count)
    with torch.inference_mode():
        got, numbers = launches_and_results()
        monkeypatch.setattr(PagedState, "attend_rounded", lambda *asked: None)
        want, others = launches_and_results()
    layers = want[1]["decode_kernel"]
    assert layers and want[1] - got[1] == Counter({"round_rows_kernel": layers}) and not got[1] - want[1]
    assert got[0] == want[0] and got[2] == want[2], "prompts and mixed steps are as they were"
    assert all(map(torch.equal, numbers, others))
