"""Passing experts that the device reads where they are, in page-locked memory. The simulated chip reads no memory of
the host, so a copy that is made once stands for it: experts do not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, Configured, on_the_cpu, worker_of
from harsh_traffic import assert_same, shrink, traffic
from test_captured_passing import CAPTURED, answers, counted, keys, passing
from test_passing_residents import keys as resident_keys

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener_conformance.reference.engine import play
from evener_conformance.simulated.device import SimulatedDevice
from evener_inspection.explanation import explain
from evener_offload import passing_part
from evener_offload.expert_slots import ExpertSlots, map_tensors
from evener_offload.passing_in_place import StackInPlace

#: The keys of these tests; prompts do not read in place.
IN_PLACE: dict[str, Any] = {"offload.pass_in_place": True, "offload.stream_prompts": "off"}


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
        raise AssertionError("experts are copied to slots")

    monkeypatch.setattr(ExpertSlots, "copy", refused)


@pytest.mark.parametrize(
    ("family", "part"),
    [("Qwen3Moe", "12"), *(pytest.param(family, "40", marks=pytest.mark.slow) for family in CAPTURED)],
)
def test_experts_read_in_place_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor], family: str, part: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together, and no memory of the device."""
    refuse_copies(monkeypatch)
    layers = FAMILIES[family][1]
    once = explain(configured(family, **{"infer.cpu_layer_num": layers}))["memory"]
    controller, ready = build_controller(configured(family, **keys(family, part), **IN_PLACE))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), on_the_cpu(family))
    assert controller.scheduler.stats.counters["host_expert_captured_steps"] > 10
    note = f"in captured steps of 2 rows or more: {part}%, where they are"
    assert note in "\n".join(ready.info.manifest.notes)
    assert counted(controller, "passed_bytes") == 0, "which ones are read the host does not see"
    biases = sum(
        each.value.nbytes
        for both in passing(controller)._biases.values()
        for each in both
        if each and each.value is not None
    )
    assert ready.info.memory.measured_weights == ready.info.memory.weights == once["weights"] + biases
    assert len(passing(controller).layer) == layers and len(reads_host) >= 2 * layers


def test_the_host_does_not_read_experts_that_the_device_reads(
    configured: Configured, reads_host: list[torch.Tensor]
) -> None:
    """Of 8 experts 2 are the device's."""
    read = []
    for part in ("off", "25"):
        controller, _ = build_controller(configured(**keys(part=part), **IN_PLACE))
        before = counted(controller, "read_bytes")
        answers(controller, 3)
        read.append(counted(controller, "read_bytes") - before)
    assert 0 < read[1] < read[0]


def test_the_weights_of_the_device_are_read_at_each_step(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor]
) -> None:
    """Nothing is kept of them from one step to the next: other numbers give other answers."""
    controller, _ = build_controller(configured(**keys(part="50"), **IN_PLACE))
    want = answers(controller, 3)
    with torch.inference_mode():
        for layer in passing(controller).layer.values():
            down = layer.stacks[1]
            assert isinstance(down, StackInPlace)
            map_tensors(down.value.data, torch.Tensor.zero_)
    assert answers(controller, 3) != want


def test_measured_costs_decide_which_part_is_read_in_place(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor]
) -> None:
    """The link rests meanwhile where the host computes nothing, so other work does not count."""
    seen: list[tuple[float, ...]] = []

    def part(*costs: float) -> float:
        seen.append(costs)
        return 0.25

    monkeypatch.setattr(passing_part, "part_for", part)
    refuse_copies(monkeypatch)
    controller, _ = build_controller(configured(**keys(part="auto"), **IN_PLACE))
    assert answers(controller, 3) == answers(build_controller(configured())[0], 3)
    assert len(seen) == len(passing(controller).part.known) > 0
    assert all(copying > 0 and host > 0 and other == 0.0 for copying, host, other, _ in seen)


def test_without_a_device_that_reads_host_memory_nothing_passes(configured: Configured) -> None:
    for own in (keys(), resident_keys()):
        _, ready = build_controller(configured(**own, **IN_PLACE))
        notes = "\n".join(ready.info.manifest.notes)
        assert "decode steps: the device does not read page-locked memory where it is" in notes


def test_experts_without_slots_are_read_in_place_too(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, reads_host: list[torch.Tensor]
) -> None:
    controller, _ = build_controller(configured(**resident_keys(), **IN_PLACE))
    shrink(controller, FEW_BLOCKS["Qwen3Moe"])
    assert_same(play(controller, **traffic()), on_the_cpu())
    numbers = np.array([layer.absent for layer in passing_of(controller).layer.values()])
    assert (numbers > 0).all() and reads_host


def passing_of(controller: Controller) -> Any:
    """Of experts in slots."""
    placement: Any = worker_of(controller).assembly.placement
    return placement._passing
