"""Prompts whose experts are divided: the device computes those that are copied to it, the host the others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expert_families import FEW_BLOCKS, Configured, blocks_of, draw_biases, on_the_cpu, results_of, worker_of
from harsh_traffic import assert_same, shrink, traffic

from evener.engine.processes.start import build_controller
from evener_conformance.reference.engine import play
from evener_offload.captured_experts import HostWork
from evener_offload.expert_costs import ExpertCosts, least_streamed
from evener_offload.prompt_share import PromptShare
from evener_offload.resident_layer import ResidentLayer

pytestmark = pytest.mark.usefixtures("few_slots")
KEYS = {"infer.cpu_layer_num": 2, "offload.stream_prompts": "auto"}
#: The chip computes on the host, so what was measured says nothing; with these both have something to do.
COSTS = ExpertCosts(1.0, 0.6, 0.3)


class Later:
    """Page-locked memory that a device reads when it gets there."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host

    def __getitem__(self, part: slice) -> Later:
        return Later(self._host[part])

    def view(self, what: Any) -> Any:
        seen = self._host.view(what)
        return Later(seen) if isinstance(what, torch.dtype) else seen.to("simulated")


class Reads:
    """What a device offers that reads the host's memory."""

    def mapped(self, host: torch.Tensor) -> Any:
        return Later(host)

    def await_word(self, word: torch.Tensor) -> None:
        deadline = time.monotonic() + 60
        while not word.item():
            assert time.monotonic() < deadline, "nobody has said that the rows are there"


@pytest.fixture(params=["a library's thread", "a library's thread, and a device that waits for it", "Python's thread"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the host's part runs beside the submitting thread."""
    way: str = request.param
    if way == "Python's thread":
        monkeypatch.delattr("evener_backend_cpu.experts._Routed.begin")
    return way


def share_of(placement: Any, way: str = "") -> PromptShare:
    share: PromptShare | None = placement.streamed._share
    assert share is not None and share._costs is not None, "measured in the warm-up"
    _, costs = share._costs
    assert costs.copy > 0 and costs.first > 0 and costs.more >= 0
    share._costs, placement.streamed._least = (share._costs[0], COSTS), 8
    if "device" in way:
        share._reads, share._room = Reads(), None
    return share


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_the_host_and_the_device_together_give_the_tokens_of_one_device(configured: Configured, family: str) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    want = on_the_cpu(family)
    controller, ready = build_controller(configured(family, **KEYS, **{"infer.use_cuda_graph": False}))
    placement: Any = worker_of(controller).assembly.placement
    share = share_of(placement)
    before = placement.counters()
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    after = placement.counters()
    assert share.computed > 100
    for name in ("host_expert_streamed_bytes", "host_expert_read_bytes", "host_expert_microseconds"):
        assert after[name] > before[name], name
    assert "the host computes those with few rows meanwhile" in "\n".join(ready.info.manifest.notes)


def test_experts_that_the_host_will_compute_are_not_copied_ahead(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = build_controller(configured(**KEYS, **{"infer.use_cuda_graph": False}))
    share = share_of(worker_of(controller).assembly.placement)
    chosen, guessed = list[list[int]](), list[set[int]]()
    choose, ahead = PromptShare.choose, ResidentLayer.ahead

    def noted(own: PromptShare, *given: Any) -> Any:
        found = choose(own, *given)
        chosen.append(found.tolist())
        return found

    def copied(layer: ResidentLayer, experts: Any, wave: Any) -> None:
        if share.active:  # steps are timed without the host's part, too
            guessed.append({expert % layer.experts for expert in experts})
            assert not guessed[-1].intersection(chosen[-1])
        ahead(layer, experts, wave)

    monkeypatch.setattr(PromptShare, "choose", noted)
    monkeypatch.setattr(ResidentLayer, "ahead", copied)
    assert not play(controller, traffic()["messages"][:2]).dead
    assert any(guessed) and any(chosen)


def test_a_block_is_that_of_one_device_up_to_rounding(configured: Configured, way: str) -> None:
    """With biases, which random weights do not have."""
    draw, read = torch.Generator().manual_seed(5), 0
    controllers = [build_controller(configured("GptOss", **keys))[0]
                   for keys in ({}, {**KEYS, "infer.use_cuda_graph": False})]  # fmt: skip
    every, few = (worker_of(controller).assembly for controller in controllers)
    both = [blocks_of(each.build)[-1] for each in (every, few)]
    assert both[0][0].path == both[1][0].path
    draw_biases(both, draw)
    placement: Any = few.placement
    site, weights = both[1]
    there = placement.streamed.biases[site.path]
    there.gate_up.value.copy_(weights.gate_up_bias)
    there.down.value.copy_(weights.down_bias)
    share = share_of(placement, way)
    placement._eager = True
    for tokens in (12, 24):
        computed = share.computed
        share.begin(tokens)
        torch.testing.assert_close(*results_of(both, tokens, draw, every.device))
        assert share.computed > computed
        before, read = read, placement.counters()["host_expert_read_bytes"]
        assert read > before, "the host's part has ended"


def test_an_error_of_the_host_ends_the_step(configured: Configured, way: str) -> None:
    controller, _ = build_controller(configured(**KEYS, **{"infer.use_cuda_graph": False}))
    share: Any = share_of(worker_of(controller).assembly.placement, way)
    mapped = share._mapped

    def wrong(path: str, chosen: Any, w: Any) -> Any:
        made = mapped(path, chosen, w)
        made.slots[chosen[0]] = 1 << 20
        return made

    share._mapped = wrong
    with pytest.raises(Exception, match="slot"):
        play(controller, traffic()["messages"][:2])
    share.close()


def test_the_host_gets_the_experts_with_the_fewest_rows_and_fewer_where_it_is_slower() -> None:
    share = PromptShare(None, None, 1, lambda: None, HostWork())  # type: ignore[arg-type]
    every = np.arange(16)
    rows = 1 + every // 4
    share._costs = 100, ExpertCosts(copy=1.0, first=1.0, more=0.5)
    fast = share.choose(100, every, rows).tolist()
    assert fast == list(range(len(fast))) and 0 < len(fast) < 16
    assert share.choose(200, every, rows).tolist() == fast, "all costs grow with the bytes"
    assert len(share.choose(100, every, rows, under_way=4.0)) > len(fast), "copies begin later"
    share._costs = 100, ExpertCosts(copy=1.0, first=3.0, more=1.5)
    slow = share.choose(100, every, rows).tolist()
    assert set(slow) < set(fast)
    share.close()


def test_the_host_takes_part_in_steps_of_a_size_where_that_was_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    now, under_way = [0.0], [0.0]
    device: Any = SimpleNamespace(synchronize=lambda: now.append(now.pop() + under_way.pop()))
    share = PromptShare(device, None, 1, lambda: None, HostWork())  # type: ignore[arg-type]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def step(tokens: int, with_host: float, without: float) -> bool:
        share.begin(tokens)
        # The host is waited for; without it, most of the step's time is of copies that were only submitted.
        submitting, under_way[:] = (with_host, [0.0]) if share.active else (without / 8, [without * 7 / 8])
        now[0] += submitting
        share.end()
        return share.active

    turns = [True, False] * 4
    assert [step(128, 2.0, 1.0) for _ in range(10)] == [*turns, False, False]
    assert [step(2048, 1.0, 2.0) for _ in range(10)] == [*turns, True, True]
    assert not step(200, 2.0, 1.0), "as large as those of 128 tokens"
    assert step(4096, 0.1, 1.0), "a warm-up, whose tokens choose few experts"
    assert [step(4096, 3.0, 2.0) for _ in range(9)] == [*turns[1:], False, False]
    assert [step(16384, 4.0, 6.0) for _ in range(10)] == [*turns, True, True]
    assert [step(8192, 9.0, 2.0), step(8192, 1.0, 2.0)] == [True, False], "what a way needs is set up"
    assert [step(8192, seconds, 2.0) for seconds in (1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0)] == [*turns[2:], True]
    assert [step(8192, 3.0, 2.0) for _ in range(247 + 9)] == [True] * 247 + [*turns, False], "tried again after a while"
    share.close()


def test_steps_whose_tokens_chose_more_experts_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    device: Any = SimpleNamespace(synchronize=lambda: None)
    share = PromptShare(device, None, 1, lambda: None, HostWork())  # type: ignore[arg-type]
    for _ in range(9):
        share.begin(128)
        for _ in range(2):  # layers
            share.note_chosen(150 if share.active else 50)
        now[0] += 2.0 if share.active else 1.0
        share.end()
    assert share.active, "three times the experts in twice the time"
    share.close()


def test_rows_beyond_the_bend_take_longer() -> None:
    costs = ExpertCosts(copy=1.0, first=2.0, more=0.5, bend=4, further=1.5)
    assert [costs.on_host(rows) for rows in (1, 4, 6)] == [2.0, 3.5, 6.5]
    assert costs.times(2.0).on_host(6) == 13.0 and costs.times(2.0).copy == 2.0


def test_sharing_is_worthwhile_in_smaller_steps_than_copying_all() -> None:
    costs = ExpertCosts(copy=2.0, first=1.0, more=0.5)
    assert least_streamed(128, 8, costs, 1024) == 64
    assert least_streamed(128, 8, costs, 1024, beside=costs) == 1
    assert least_streamed(128, 8, costs, 1024, beside=costs, submitted=20.0) == 8
