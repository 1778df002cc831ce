"""Experts of host layers that are copied to the device in large steps: the tokens of one device that holds all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expert_families import FAMILIES, FEW_BLOCKS, Configured, assert_auto_leaves_room_for_slots, on_the_cpu, worker_of
from harsh_traffic import LIMITS, assert_same, shrink, traffic
from test_packed_host_experts import fp8_folder, q4_k_m_experts

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.errors import ConfigError
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain
from evener_offload.expert_costs import ExpertCosts, least_streamed
from evener_offload.host_experts import HostExperts
from evener_offload.placed_layers import stacks
from evener_offload.prefetch import Prefetch
from evener_offload.streamed_layers import SLOTS, StreamedLayers

pytestmark = pytest.mark.usefixtures("few_slots")


def placement_of(controller: Any) -> HostExperts:
    found = worker_of(controller).assembly.placement
    assert isinstance(found, HostExperts)
    return found


@pytest.mark.parametrize("family", [f if f == "GptOss" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_large_steps_on_the_device_and_small_ones_on_the_host_give_the_tokens_of_one_device(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    early, begin = list[int](), Prefetch.begin

    def noted(prefetch: Prefetch, tokens: int) -> None:
        before = slots.residents.copied
        begin(prefetch, tokens)
        early.append(slots.residents.copied - before)

    want, layers = on_the_cpu(family), FAMILIES[family][1]
    keys = {"infer.cpu_layer_num": layers}
    once = explain(configured(family, **keys))["memory"]
    controller, ready = build_controller(configured(family, **keys, **{"offload.stream_prompts": "16"}))
    shrink(controller, FEW_BLOCKS[family])
    placement = placement_of(controller)
    (slots,) = placement.streamed.groups
    monkeypatch.setattr(Prefetch, "begin", noted)
    assert_same(play(controller, **traffic()), want)
    counters = controller.scheduler.stats.counters
    assert counters["host_expert_streamed_tokens"] > 100 * layers and counters["host_expert_microseconds"] > 0
    assert counters["host_expert_streamed_bytes"] == slots.residents.copied * slots.nbytes > 100 * slots.nbytes
    assert slots.residents.right > 0, "experts of the next layer are copied ahead"
    assert any(early), "and those of the first one when a step begins"
    memory = ready.info.memory
    assert memory.measured_host == memory.host == once["host"] + placement.streamed.second_bytes
    biases = sum(each.value.nbytes for both in placement.streamed.biases.values() for each in both if each)
    assert memory.measured_weights == memory.weights == once["weights"] + SLOTS * slots.nbytes + biases
    assert (biases > 0) == (family == "GptOss"), "products on the device read biases there"
    assert "for large steps: those with 16 tokens or more" in "\n".join(ready.info.manifest.notes)


@pytest.mark.parametrize("write", [q4_k_m_experts, pytest.param(fp8_folder, marks=pytest.mark.slow)])
def test_packed_experts_are_copied_in_a_layout_of_the_device(tmp_path: Path, write: Any) -> None:
    model = write("DeepseekV3", tmp_path)
    keys = {**LIMITS, "dtype": "float32", "infer.threads": 1}
    on_cpu = from_overrides(model, {**keys, "backend": "cpu", "infer.block_size": 128})
    want = play(build_controller(on_cpu)[0], **traffic())
    chip = {**keys, "backend": "simulated", "infer.cpu_layer_num": 1, "offload.stream_prompts": "16"}
    controller, ready = build_controller(from_overrides(model, chip))
    assert_same(play(controller, **traffic()), want)
    counters = controller.scheduler.stats.counters
    assert counters["host_expert_streamed_tokens"] > 100 and counters["host_expert_microseconds"] > 0
    assert placement_of(controller).streamed.second_bytes > 0
    assert ready.info.memory.measured_host == ready.info.memory.host


def test_measured_costs_decide_which_steps_are_streamed(configured: Configured) -> None:
    want = on_the_cpu()
    # The first eager step measures. Where steps are captured, and the memory for state is set, that is a prompt's.
    keys = {"infer.cpu_layer_num": 3, "offload.stream_prompts": "auto", "infer.use_cuda_graph": False}
    controller, ready = build_controller(configured(**keys))
    streamed = placement_of(controller).streamed
    assert streamed.takes(1) is not None and streamed.takes(1 << 29) is not None, "measured in the warm-up"
    assert "for large steps: measured costs decide" in "\n".join(ready.info.manifest.notes)
    streamed._least = 24  # the chip computes on the host, so what was measured says nothing
    before = streamed.tokens
    assert_same(play(controller, **traffic()), want)
    assert streamed.tokens > before and not streamed.takes(23) and streamed.takes(24)


@pytest.mark.slow
def test_ranks_settle_one_number_and_halves_are_of_steps_that_are_not_streamed(configured: Configured) -> None:
    want = on_the_cpu()
    keys = {"infer.tp_size": 2, "infer.cpu_layer_num": 2, "offload.halves": "on", "offload.stream_prompts": "auto"}
    with rank_threads(configured(**keys)) as (controller, ranks):
        placed: list[Any] = [worker.assembly.placement for worker in ranks.workers]
        assert placed[0].streamed._least == placed[1].streamed._least is not None
        for each in placed:
            each.streamed._least = 12
        before = [each.counters()["host_expert_halved_steps"] for each in placed]
        assert_same(play(controller, **traffic()), want)
        after = [each.counters()["host_expert_halved_steps"] for each in placed]
        assert after[0] > before[0] and after[1] > before[1]
        assert placed[0].streamed.tokens == placed[1].streamed.tokens > 100


def test_measured_costs_do_not_decide_where_memory_or_streams_are_missing(configured: Configured) -> None:
    assembly = worker_of(build_controller(configured(**{"infer.cpu_layer_num": 3}))[0]).assembly
    placement: Any = assembly.placement
    sites = [site for site in assembly.build.sites if site.op == "moe_block"]
    host, stream = placement._resolver, object()
    bytes_of_both = 2 * placement.layers.__len__() * 96 * 3 * 64 * 50 * 4
    assert StreamedLayers.worthwhile(sites, host, assembly.resolver, stream, bytes_of_both)
    assert not StreamedLayers.worthwhile(sites, host, assembly.resolver, stream, bytes_of_both - 1)
    assert not StreamedLayers.worthwhile(sites, host, assembly.resolver, None, bytes_of_both)
    assert StreamedLayers.room(sites, host.packings_by_layout) == SLOTS * 3 * 64 * 50 * 4
    assert all(each.layout == "plain" for site in sites for each in stacks(site))


def test_auto_leaves_room_for_the_slots(configured: Configured) -> None:
    assert_auto_leaves_room_for_slots(configured, "offload.stream_prompts", "16")


def test_copies_are_sooner_from_the_step_on_in_which_experts_have_rows_enough() -> None:
    costs = ExpertCosts(copy=2.0, first=1.0, more=0.5)
    # With one expert for all tokens: 2 is less than 1 + 0.5 (T - 1) from 4 on.
    assert least_streamed(1, 1, costs, 64) == 4
    assert least_streamed(128, 8, costs, 1024) == 64
    assert least_streamed(128, 8, costs, 32) is None
    assert least_streamed(128, 8, replace(costs, more=0.0), 1 << 20) is None
    assert least_streamed(128, 8, replace(costs, copy=0.5), 64) == 1


@pytest.mark.parametrize("value", ["sometimes", "0", "-1"])
def test_a_number_that_is_none_is_refused(configured: Configured, value: str) -> None:
    with pytest.raises(ConfigError, match=r"offload.stream_prompts='.*': set auto, off, or the tokens of the smallest"):
        build_controller(configured(**{"infer.cpu_layer_num": 1, "offload.stream_prompts": value}))
