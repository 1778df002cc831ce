"""Passing experts that the device copies once tokens have chosen them. The simulated chip reads no memory of the host,
so a copy that is made once stands for it: experts do not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, Configured, on_the_cpu, worker_of
from harsh_traffic import assert_same, shrink, traffic
from test_captured_passing import CAPTURED, answers, counted, keys, passing
from test_passing_residents import keys as resident_keys

from evener.engine.processes.start import build_controller
from evener_conformance.reference.engine import play
from evener_conformance.simulated.device import SimulatedDevice
from evener_inspection.explanation import explain
from evener_offload import passing_part
from evener_offload.expert_slots import ExpertSlots
from evener_offload.passing_chosen import PARTS, split_chosen

#: The keys of these tests; prompts do not read in place.
CHOSEN: dict[str, Any] = {"offload.pass_chosen": True, "offload.stream_prompts": "off"}


@pytest.fixture
def reads_host(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that the chip has been given to read where they are."""
    given: list[torch.Tensor] = []

    init = SimulatedDevice.__init__

    def mapped(where: torch.device, host: torch.Tensor) -> torch.Tensor:
        assert host.device.type == "cpu" and host.is_contiguous()
        given.append(host)
        return host.to(where)

    def made(self: Any, *inputs: Any, **named: Any) -> None:
        init(self, *inputs, **named)
        # Not of the class: Python remembers which classes have a protocol's methods.
        self.mapped = partial(mapped, self.torch_device)

    monkeypatch.setattr(SimulatedDevice, "__init__", made)
    return given


def refuse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*inputs: Any) -> None:
        raise AssertionError("experts are copied ahead")

    monkeypatch.setattr(ExpertSlots, "copy", refused)


@pytest.mark.parametrize(
    ("family", "part"),
    [("Qwen3Moe", "12"), *(pytest.param(family, "40", marks=pytest.mark.slow) for family in CAPTURED)],
)
def test_chosen_experts_that_pass_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor], family: str, part: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    refuse_copies(monkeypatch)
    layers = FAMILIES[family][1]
    controller, ready = build_controller(configured(family, **keys(family, part), **CHOSEN))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), on_the_cpu(family))
    assert controller.scheduler.stats.counters["host_expert_captured_steps"] > 10
    note = f"in captured steps of 2 rows or more: {part}%, of those that are chosen"
    assert note in "\n".join(ready.info.manifest.notes)
    assert counted(controller, "passed_bytes") == 0, "which ones pass the host does not see"
    assert ready.info.memory.measured_weights == ready.info.memory.weights
    assert len(passing(controller).layer) == layers and len(reads_host) >= 2 * layers


def test_all_layers_use_one_set_of_slots(configured: Configured, reads_host: list[torch.Tensor]) -> None:
    once = explain(configured(**{"infer.cpu_layer_num": FAMILIES["Qwen3Moe"][1]}))["memory"]["weights"]
    ahead, chosen = (
        explain(configured(**keys(part="25"), **more))["memory"]["weights"] - once for more in ({}, CHOSEN)
    )
    assert 0 < chosen < ahead


@pytest.mark.parametrize("own", [keys, resident_keys])
def test_the_host_reads_fewer_experts_the_more_pass(
    configured: Configured, reads_host: list[torch.Tensor], own: Any
) -> None:
    read = []
    for part in ("off", "25", "50"):
        controller, _ = build_controller(configured(**own(part=part), **CHOSEN))
        before = counted(controller, "read_bytes")
        assert answers(controller, 3) == answers(build_controller(configured())[0], 3)
        read.append(counted(controller, "read_bytes") - before)
    assert 0 < read[2] < read[1] < read[0]


def test_slots_hold_what_the_device_reads_at_each_step(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor]
) -> None:
    """Other numbers in host memory give other answers."""
    controller, _ = build_controller(configured(**keys(part="50"), **CHOSEN))
    want = answers(controller, 3)
    with torch.inference_mode():
        chosen: Any = passing(controller)._chosen
        for sources, _ in chosen._rows.values():
            for each in sources:
                each.zero_()
    assert answers(controller, 3) != want


def test_measured_costs_decide_which_part_of_the_chosen_ones_passes(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor]
) -> None:
    """The link rests meanwhile where the host computes nothing, so other work does not count."""
    seen: list[tuple[float, ...]] = []

    def part(*costs: float) -> float:
        seen.append(costs)
        return 0.25

    monkeypatch.setattr(passing_part, "part_for", part)
    refuse_copies(monkeypatch)
    controller, _ = build_controller(configured(**keys(part="auto"), **CHOSEN))
    assert answers(controller, 3) == answers(build_controller(configured())[0], 3)
    assert len(seen) == len(passing(controller).part.known) > 0
    assert all(copying > 0 and host > 0 and other == 0.0 for copying, host, other, _ in seen)


def test_without_a_device_that_reads_host_memory_nothing_passes(configured: Configured) -> None:
    for own in (keys(), resident_keys()):
        _, ready = build_controller(configured(**own, **CHOSEN))
        notes = "\n".join(ready.info.manifest.notes)
        assert "decode steps: the device does not read page-locked memory where it is" in notes


def test_experts_without_slots_pass_too(configured: Configured, reads_host: list[torch.Tensor]) -> None:
    """And any of them may get a slot."""
    controller, _ = build_controller(configured(**resident_keys(), **CHOSEN))
    shrink(controller, FEW_BLOCKS["Qwen3Moe"])
    assert_same(play(controller, **traffic()), on_the_cpu())
    placement: Any = worker_of(controller).assembly.placement
    assert all(layer.absent > 0 for layer in placement._passing.layer.values()) and reads_host
    assert all(layer.residents.passing == 0 for layer in placement.layer.values())


def test_experts_whose_tensors_are_not_in_one_piece_do_not_pass(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor]
) -> None:
    monkeypatch.setattr(ExpertSlots, "rows", lambda self, number: None)
    controller, _ = build_controller(configured(**keys(part="50"), **CHOSEN))
    assert answers(controller, 3) == answers(build_controller(configured())[0], 3)
    assert not reads_host and not passing(controller).part.known


def test_the_first_chosen_experts_without_a_place_are_the_devices() -> None:
    ids = torch.tensor([[6, 1], [3, 6], [4, 0]], dtype=torch.int32)  # chosen: 0, 1, 3, 4, 6
    held = torch.tensor([2, -1, 0, -1, -1, 1, -1, -1], dtype=torch.int32)[:, None]  # of them 1, 3, 4, 6
    others, slots, copies, experts, used = split_chosen(ids, held, 8, 3, PARTS // 2)
    assert others.tolist() == [[6, 8], [8, 6], [4, 0]]
    assert slots[:, 0].tolist() == [-1, 0, -1, 1, -1, -1, -1, -1] and copies.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert experts.tolist() == [1, 3, 0] and used.tolist() == [2]


@pytest.mark.parametrize(("most", "part", "want"), [(8, PARTS, 5), (3, PARTS, 3), (8, 0, 0), (8, 77, 2)])
def test_a_part_of_the_chosen_experts_is_rounded_and_limited_by_slots(most: int, part: int, want: int) -> None:
    ids = torch.tensor([[6, 1], [3, 6], [4, 0]], dtype=torch.int32)
    *_, used = split_chosen(ids, None, 8, most, part)
    assert used.tolist() == [want]
