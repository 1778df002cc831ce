"""Sampling follows the exact distribution, with random numbers that depend only on (seed, position, id)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributions import DRAWS, FILTERS, LOGITS, PENALTIES, VOCABULARY, adjusted, adjusted_by, exact, fits
from test_memory_measured import Meter

from evener.contracts.ops import OpFunction
from evener.engine.sampling.sampler import Sampler
from evener.ops.reference import sampling


def op(name: str, vocabulary: int = VOCABULARY) -> OpFunction:
    function: OpFunction = getattr(sampling, name)(
        {"vocab": vocabulary, "filters": True}, lambda *_, **__: pytest.fail("it is a primitive")
    )
    return function


def draw(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = logits.shape[0]
    counter = torch.arange(rows, dtype=torch.int32)
    return op("sample", logits.shape[1])(  # type: ignore[no-any-return]
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full_like(counter, 7) if seeds is None else seeds,
        counter if positions is None else positions,
    )


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_have_the_exact_distribution(settings: dict[str, Any], by: str) -> None:
    counter = torch.arange(DRAWS, dtype=torch.int32)
    fixed = torch.full_like(counter, 12345)
    seeds, positions = (fixed, counter) if by == "position" else (counter, fixed)
    ids = draw(LOGITS.expand(DRAWS, -1), seeds=seeds, positions=positions, **settings)
    assert ids.dtype == torch.int32
    assert fits(torch.bincount(ids.long(), minlength=VOCABULARY).tolist(), exact(**settings))


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_draws_under_penalties_and_biases_have_the_exact_distribution(settings: dict[str, Any]) -> None:
    filters, by_hand = adjusted(settings)
    logits, at = adjusted_by(op, settings).expand(DRAWS, -1), torch.zeros(DRAWS, dtype=torch.int32)
    counts = torch.bincount(
        draw(logits, seeds=torch.arange(DRAWS, dtype=torch.int32), positions=at, **filters).long(), minlength=VOCABULARY
    ).tolist()
    assert fits(counts, exact(**filters, logits=by_hand))
    if settings != {"bias": {4: -100.0}}:
        assert not fits(counts, [p or 1e-9 for p in exact()])


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_of_allowed_tokens_have_the_exact_distribution(settings: dict[str, Any]) -> None:
    allowed = [0, 2, 3, 5, 8, 9, 11]
    mask = torch.full((DRAWS, 1), sum(1 << i for i in allowed), dtype=torch.int32)
    logits = op("apply_mask")(LOGITS.expand(DRAWS, -1), mask)
    ids = draw(logits, seeds=torch.arange(DRAWS, dtype=torch.int32), **settings)
    left = [x if i in allowed else -math.inf for i, x in enumerate(LOGITS.tolist())]
    counts = torch.bincount(ids.long(), minlength=VOCABULARY).tolist()
    assert fits(counts, exact(**settings, logits=left))


@pytest.mark.parametrize("tokens", [5, 6], ids=["below", "at"])
def test_draws_below_the_least_number_of_tokens_have_no_end_and_the_exact_distribution(tokens: int) -> None:
    ends, until = [2, 7], 6
    counter = torch.arange(DRAWS, dtype=torch.int32)
    entries = torch.tensor([ends], dtype=torch.int32).expand(DRAWS, -1)
    barred, at = torch.full_like(entries, -math.inf, dtype=torch.float32), torch.full_like(counter, tokens)
    logits = LOGITS.expand(DRAWS, -1).contiguous()
    logits = op("add_bias")(logits, entries, barred, torch.full_like(entries, until), at)
    ids = draw(logits, 0.8, seeds=counter, positions=at)
    left = [-math.inf if i in ends and tokens < until else x for i, x in enumerate(LOGITS.tolist())]
    assert fits(torch.bincount(ids.long(), minlength=VOCABULARY).tolist(), exact(0.8, logits=left))


def test_the_check_itself_notices_a_wrong_distribution() -> None:
    ids = draw(LOGITS.expand(DRAWS, -1), temperature=1.05)
    assert not fits(torch.bincount(ids.long(), minlength=VOCABULARY).tolist(), exact())


def test_neighbouring_positions_are_independent() -> None:
    ids = draw(torch.zeros(DRAWS, 4)).long()
    pairs = torch.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    assert fits(pairs.tolist(), [1 / 16] * 16)


def test_sampling_of_a_row_is_independent_of_batch_and_position() -> None:
    noise = torch.Generator().manual_seed(11)
    rows = torch.randn(9, 300, generator=noise)
    seeds = torch.arange(9, dtype=torch.int32) * 1001 - 4000
    positions = torch.arange(9, dtype=torch.int32) * 7
    together = draw(rows, 1.3, 50, 0.95, 0.001, seeds, positions)
    order = torch.randperm(9, generator=noise)
    assert torch.equal(draw(rows[order], 1.3, 50, 0.95, 0.001, seeds[order], positions[order]), together[order])
    for i in range(9):
        assert draw(rows[i : i + 1], 1.3, 50, 0.95, 0.001, seeds[i : i + 1], positions[i : i + 1]).item() == together[i]


def test_a_temperature_zero_row_is_greedy_whatever_its_filters_and_neighbours() -> None:
    noise = torch.Generator().manual_seed(11)
    rows = torch.randn(6, 40, generator=noise)
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 1.0])
    ones, none = torch.ones(6), torch.zeros(6, dtype=torch.int32)
    ids = op("sample", 40)(rows, temperature, none, ones * 0.9, ones * 0, none, none)
    cold = temperature == 0
    assert torch.equal(ids[cold], op("greedy", 40)(rows)[cold])


def test_sampling_noise_is_reproducible_bit_for_bit() -> None:
    """The integers are the contract: every backend must give them."""
    bits = sampling.hash32(torch.tensor([0, 1, -1, 123456789], dtype=torch.int32))
    assert bits.dtype == torch.int32
    assert [b & 0xFFFFFFFF for b in bits.tolist()] == [lowbias32(x) for x in (0, 1, 0xFFFFFFFF, 123456789)]


def lowbias32(x: int) -> int:
    """Chris Wellons' function in unbounded integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def test_the_largest_noise_does_not_win_against_every_logit() -> None:
    """For this seed, position and id the hash is all ones where it counts."""
    logits = torch.zeros(1, 33)
    logits[0, 9] = -60.0
    noise = sampling.gumbel(*(torch.tensor([[x]], dtype=torch.int32) for x in (61, 2308, 9)))
    assert 16 < noise.item() < 18
    seed, position = torch.tensor([61], dtype=torch.int32), torch.tensor([2308], dtype=torch.int32)
    assert draw(logits, seeds=seed, positions=position).item() != 9
    logits[0, 9] = -math.inf
    assert draw(logits, seeds=seed, positions=position).item() != 9


def test_noise_is_finite_for_every_hash() -> None:
    ids = torch.arange(200_000, dtype=torch.int32)[None]
    noise = sampling.gumbel(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), ids)
    assert noise.isfinite().all() and abs(noise.mean().item() - 0.5772) < 0.01


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    noise = torch.Generator().manual_seed(11)
    rows = torch.randn(5, 30, generator=noise) * 3
    ids = torch.tensor([0, 3, 7, 29, 11], dtype=torch.int32)
    chosen, values, top = op("logprobs", 30)(rows, ids, 4)
    expected = rows.log_softmax(-1)
    assert torch.equal(chosen, expected[torch.arange(5), ids.long()])
    best, where = expected.topk(4)
    assert torch.equal(values, best) and torch.equal(top.long(), where) and top.dtype == torch.int32
    assert op("logprobs", 30)(rows, ids, 0)[1].shape == (5, 0)


def test_a_packed_mask_removes_exactly_the_ids_whose_bit_is_zero() -> None:
    noise = torch.Generator().manual_seed(11)
    allowed = torch.rand(3, 70, generator=noise) < 0.5
    mask = torch.zeros(3, 3, dtype=torch.int64)
    for i in range(70):
        mask[:, i // 32] |= allowed[:, i].long() << (i % 32)
    packed = torch.where(mask >= 1 << 31, mask - (1 << 32), mask).to(torch.int32)
    rows = torch.randn(3, 70, generator=noise)
    masked = op("apply_mask", 70)(rows.clone(), packed)
    assert torch.equal(masked.isfinite(), allowed) and torch.equal(masked[allowed], rows[allowed])


def test_unfiltered_fast_path_draws_the_same_tokens_as_the_sorted_path() -> None:
    rows, vocabulary = 64, 300
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3))
    counter = torch.arange(rows, dtype=torch.int32)
    none, ones = torch.zeros(rows, dtype=torch.int32), torch.ones(rows)
    inputs = (logits, ones * 0.8, none, ones, ones * 0, counter * 7, counter)
    short = sampling.sample({"vocab": vocabulary, "filters": False}, lambda *_, **__: pytest.fail("it is a primitive"))
    assert torch.equal(short(*inputs), op("sample", vocabulary)(*inputs))


class Alone:
    """Call sites of a sampler without a model: ops by name, the reference where none is given."""

    def __init__(self, **ops: OpFunction) -> None:
        self._ops = ops

    def op(self, name: str, path: str, **static: Any) -> Any:
        function = self._ops.get(name) or getattr(sampling, name)(static, lambda *_, **__: pytest.fail("a primitive"))
        return SimpleNamespace(table=[function] * 16)


def tables(rows: int) -> Any:
    """Parameters of as many requests, whose sequences have 6 tokens; each has its own penalties and biases."""
    numbers = torch.arange(rows)
    ints = torch.stack([numbers * 0, numbers * 7, numbers * 0 + 3], dim=1).to(torch.int32)
    floats = torch.stack([numbers % 3 * 0.5, *(numbers * 0.0 + v for v in (0.9, 0.0, 1.3, 0.5)), numbers * 0.01], dim=1)
    entries = (numbers % 7).to(torch.int32)[:, None], numbers[:, None] * 0.1, torch.full((rows, 1), 99).int()
    tokens = (numbers[:, None] + torch.arange(8) ** 2).remainder(VOCABULARY).int()
    return SimpleNamespace(tokens=tokens, ints=ints, floats=floats, biases=entries)


def test_subsets_of_rows_are_sampled_as_in_the_full_batch() -> None:
    rows, sampler = 100, Sampler(Alone(), VOCABULARY)  # type: ignore[arg-type]
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))
    slots, at, some = torch.arange(rows).int(), torch.full((rows,), 6).int(), torch.arange(5, rows, 2).int()
    table, every = tables(rows), torch.arange(rows).int()
    want = sampler.adjust(logits.clone(), table, slots, at, 6, every, every)
    got = sampler.adjust(logits.clone(), table, slots, at, 6, some, some)
    assert torch.equal(got[5::2], want[5::2])
    assert torch.equal(got[::2], logits[::2])
    drawn = sampler.ids(logits, table.floats, table.ints, at, every)
    best = logits.argmax(-1).int()
    assert not torch.equal(drawn, best)
    mixed = sampler.ids(logits, table.floats, table.ints, at, some)
    assert torch.equal(mixed[5::2], drawn[5::2])
    assert torch.equal(mixed[::2], best[::2])


@pytest.mark.parametrize("count", [1, 99, 100])
def test_the_logits_of_a_step_are_never_copied_all_at_once(count: int, one_thread: None) -> None:
    """The memory plan has them once: ops may take no memory of their own here."""
    rows, vocabulary = 100, 20_000
    sampler = Sampler(
        Alone(
            penalize=lambda logits, *_: logits, add_bias=lambda logits, *_: logits,
            sample=lambda logits, *_: torch.zeros(len(logits), dtype=torch.int32),
        ),  # type: ignore[arg-type]
        vocabulary,
    )  # fmt: skip
    logits, table = torch.zeros(rows, vocabulary), tables(rows)
    slots, at, some = torch.arange(rows).int(), torch.full((rows,), 6).int(), torch.arange(count).int()
    with Meter() as meter:
        changed = sampler.adjust(logits, table, slots, at, 6, some, some)
        sampler.ids(changed, table.floats, table.ints, at, some)
    assert changed.data_ptr() == logits.data_ptr()
    assert meter.peak <= (0 if count == rows else min(32, count) * 4 * vocabulary) + (64 << 10)
