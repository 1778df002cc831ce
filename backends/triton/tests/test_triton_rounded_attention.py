"""Attention whose result is rounded for the product that follows, under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import every_access_checked
from test_triton_rounded import FIXED, packed, rounding_part

from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener_kernels_triton import rounded
from evener_kernels_triton.rounded import RoundedRows, round_rows
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.stored import StoredMatrix
from evener_kernels_triton.tuning import Tuning

#: Of a device with few units, which keys are not split for, and of one with many.
NARROW, WIDE = Tuning(1, 48 << 10, False), Tuning(132, 227 << 10, False)
HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 16


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def weight_of(storage: str, group: int) -> StoredMatrix:
    """An output projection whose activations have scales of ``group`` columns; -1: a fixed one."""
    return packed([rounding_part(16, HEADS * DIM, (storage, group if group > 0 else -1, max(group, 1), group))])


class Step:
    """A step of requests of these lengths, of which each adds its last ``adds`` tokens, in bfloat16."""

    def __init__(self, tuning: Tuning, lengths: list[int], adds: int = 1, stored: str = "") -> None:
        draw = torch.Generator().manual_seed(sum(lengths))
        kinds = (stored, "bfloat16") if stored else ("bfloat16", None)
        tensors = tuple(StateTensor(name, (KV_HEADS, DIM), *kinds) for name in ("key", "value"))
        spec, attention = StateSpec("full", tensors), AttentionSpec(HEADS, DIM, 0.2, dtype="bfloat16", sinks=True)
        columns, rows = -(-max(lengths) // PAGE), len(lengths)
        table = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
        self.provider, self.sinks = PagedState(tuning), torch.linspace(-1, 1, HEADS).bfloat16()
        storage = torch.zeros(rows * columns, spec.nbytes * PAGE, dtype=torch.uint8)
        if stored:
            scales = tuple(torch.full((KV_HEADS,), 0.02 * by) for by in (1, 2))
            self.views = self.provider.bind_scaled(storage, spec, PAGE, scales)
            self.views.storage.view(torch.int8).random_(-60, 60, generator=draw)
        else:
            self.views = self.provider.bind(storage, spec, PAGE)
            for part in (self.views.keys, self.views.values):
                part.copy_(torch.randn(part.shape, generator=draw))
        tokens, ints = rows * adds, torch.tensor(lengths).int()
        starts = torch.arange(0, tokens + 1, adds, dtype=torch.int32)
        zeros = torch.zeros(tokens, dtype=torch.int32)
        step = StateStep(tokens, rows, adds, max(lengths), starts, ints, zeros, zeros, table, [adds] * rows, lengths)
        self.meta: Any = self.provider.prepare(step, spec, attention, PAGE)
        self.query = torch.randn(tokens, HEADS, DIM, generator=draw).bfloat16() * 3

    def both(self, weight: StoredMatrix, sinks: bool = False) -> tuple[RoundedRows, RoundedRows]:
        """Rounded by attention, and afterwards."""
        given, tuning = self.sinks if sinks else None, self.provider._tuning
        with every_access_checked():
            got = self.provider.attend_rounded(self.views, self.meta, self.query, given, weight)
            rows = self.provider.attend(self.views, self.meta, self.query, given)
        return got, round_rows(tuning, rows.flatten(1), weight)


def assert_same(got: RoundedRows, want: RoundedRows) -> None:
    """In every bit that is used."""
    assert (got.group, got.tokens, got.elements.shape) == (want.group, want.tokens, want.elements.shape)
    bits = (each.elements.view(torch.uint8)[: each.tokens] for each in (got, want))
    torch.testing.assert_close(*bits, rtol=0, atol=0)
    scales = (each.scales if each.group < 0 else each.scales[:, : each.tokens] for each in (got, want))
    torch.testing.assert_close(*scales, rtol=0, atol=0)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("tuning", [NARROW, WIDE], ids=["whole", "splits"])
@pytest.mark.parametrize("group", [-1, DIM], ids=["fixed", "heads"])
def test_a_decode_step_rounds_in_the_launch_of_attention_bit_for_bit(
    group: int, tuning: Tuning, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, weight = Step(tuning, [1, 200, 33]), weight_of("float8_e4m3fn", group)
    assert (step.meta.decode.grid[2] > 1) == (tuning is WIDE)
    got, want = step.both(weight, sinks)
    assert_same(got, want)
    assert len(got.elements.view(torch.uint8)[:3].unique()) > 20, "not the same number everywhere"
    monkeypatch.setattr(rounded, "round_rows_kernel", None)  # a launch of its own would fail
    again = step.provider.attend_rounded(step.views, step.meta, step.query, step.sinks if sinks else None, weight)
    assert_same(again, want)


def test_quantized_state_is_rounded_behind_its_own_scales() -> None:
    step = Step(WIDE, [70, 3], stored="int8")
    assert_same(*step.both(weight_of("float8_e4m3fn", DIM)))


@pytest.mark.parametrize("group", [16, 64, 0])
def test_groups_that_are_not_heads_are_rounded_afterwards(group: int) -> None:
    weight = packed([rounding_part(16, HEADS * DIM, ("float8_e4m3fn", group, 1, group))])
    assert_same(*Step(WIDE, [40, 5]).both(weight))


def test_integers_are_rounded_afterwards() -> None:
    assert_same(*Step(WIDE, [40, 5]).both(weight_of("int8", -1)))


def test_prompts_are_rounded_afterwards() -> None:
    assert_same(*Step(WIDE, [40, 9], adds=4).both(weight_of("float8_e4m3fn", -1)))


def test_results_beyond_a_fixed_scale_are_cut_off() -> None:
    step, weight = Step(WIDE, [20, 20]), weight_of("float8_e4m3fn", -1)
    step.views.values.mul_(1000)
    got, want = step.both(weight)
    assert_same(got, want)
    assert got.elements.float().abs().max() == 448 and got.scales.item() == pytest.approx(FIXED)
