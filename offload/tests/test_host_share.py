"""Missing experts that the host computes beside the device: the tokens of one device that holds all experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from expert_families import FEW_BLOCKS, Configured, blocks_of, draw_biases, on_the_cpu, results_of, worker_of
from harsh_traffic import assert_same, shrink, traffic

from evener.engine.processes.start import build_controller
from evener.errors import ConfigError
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain
from evener_offload.expert_costs import ExpertCosts
from evener_offload.host_share import HostShare
from evener_offload.resident_experts import ResidentExperts

#: The host reads what the reference of the chip does.
KEYS = {"infer.resident_experts": 8, "ops.grouped_linear": "reference", "simulated.host_reads": True}


def share_of(controller: Any) -> HostShare:
    found = worker_of(controller).assembly.placement
    assert isinstance(found, ResidentExperts) and found.share is not None
    return found.share


@pytest.mark.parametrize(
    ("family", "rule"),
    [("Qwen3Moe", "auto"), *((family, "2") for family in ("Qwen3Moe", "GptOss", "DeepseekV3"))],
)
@pytest.mark.slow
def test_the_host_and_the_device_together_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, family: str, rule: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    want = on_the_cpu(family)
    controller, ready = build_controller(configured(family, **KEYS, **{"offload.host_when_sooner": rule}))
    share = share_of(controller)
    if rule == "auto":
        assert share._costs, "measured in the warm-up"
        for costs in share._costs.values():
            assert costs.copy > 0 and costs.first > 0 and costs.more >= 0
        # The chip computes on the host, so what was measured says nothing; now both have something to do.
        share._costs = dict.fromkeys(share._costs, ExpertCosts(1.0, 0.6, 0.3))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    counters = controller.scheduler.stats.counters
    assert counters["expert_host_computed"] > 100 and counters["expert_misses"] > 100
    assert any("the host computes missing experts" in note for note in ready.info.manifest.notes)
    assert ready.info.memory.measured_host == ready.info.memory.host


def test_a_block_is_that_of_a_device_that_holds_all_up_to_rounding(configured: Configured) -> None:
    """With biases, which random weights do not have."""
    draw = torch.Generator().manual_seed(5)
    every, few = (
        worker_of(build_controller(configured("GptOss", **keys))[0]).assembly
        for keys in ({}, {**KEYS, "offload.host_when_sooner": "64"})
    )
    both = [blocks_of(each.build)[0] for each in (every, few)]
    draw_biases(both, draw)
    assert few.placement is not None
    few.placement.share._biases.clear()  # type: ignore[attr-defined]
    few.placement._eager = True  # type: ignore[attr-defined]  # a call outside of a step would be one of a capture
    before: Mapping[str, int] = few.placement.counters()
    for tokens in (1, 3, 24):
        torch.testing.assert_close(*results_of(both, tokens, draw, every.device))
    after = few.placement.counters()
    assert after["expert_host_computed"] > before["expert_host_computed"]
    assert after["expert_misses"] == before["expert_misses"]


def test_experts_that_the_host_computes_are_copied_to_the_device_little_by_little(configured: Configured) -> None:
    controller, _ = build_controller(configured(**KEYS, **{"offload.host_when_sooner": "64"}))
    assert not play(controller, traffic()["messages"][:2]).dead
    placement = worker_of(controller).assembly.placement
    assert isinstance(placement, ResidentExperts)
    layers = [layer.residents for layer in placement.layer.values()]
    assert all(each.copied > each.misses and each.hits for each in layers)


@pytest.mark.slow
def test_two_ranks_let_the_host_compute_their_parts(configured: Configured) -> None:
    want = on_the_cpu()
    keys = {**KEYS, "infer.tp_size": 2, "offload.host_when_sooner": "2"}
    with rank_threads(configured(**keys)) as (controller, _):
        assert_same(play(controller, **traffic()), want)
        assert controller.scheduler.stats.counters["expert_host_computed"] > 100


@pytest.mark.parametrize("value", ["sometimes", "0", "65", "-1"])
def test_a_rule_that_is_none_is_refused(configured: Configured, value: str) -> None:
    with pytest.raises(ConfigError, match=r"offload.host_when_sooner='.*': set auto, off, or a number from 1 to 64"):
        build_controller(configured(**KEYS, **{"offload.host_when_sooner": value}))


def test_a_layout_that_the_host_cannot_read_is_in_host_memory_a_second_time(configured: Configured) -> None:
    want = on_the_cpu()
    keys = {"infer.resident_experts": 8, "offload.host_when_sooner": "2"}
    once = explain(configured(**{"infer.resident_experts": 8}))["memory"]["host"]
    controller, ready = build_controller(configured(**keys))
    assert ready.info.memory.measured_host == ready.info.memory.host == 2 * once
    assert_same(play(controller, **traffic()), want)
    assert controller.scheduler.stats.counters["expert_host_computed"] > 100
