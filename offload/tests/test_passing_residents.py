"""Experts without slots that pass through the device in captured steps of the simulated chip: others are in slots, and
the host computes the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, Configured, capture_prompts, on_the_cpu, worker_of
from harsh_traffic import assert_same, assert_some, shrink, some, traffic
from test_captured_experts import Asking, chip
from test_captured_passing import CAPTURED, answers, counted, slotted
from test_captured_residents import captured, placed

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.errors import ConfigError
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain
from evener_offload import choice_counts, passing_part, passing_slots, resident_experts, slot_products
from evener_offload.captured_passing import CapturedPassing
from evener_offload.expert_slots import ExpertSlots, map_tensors, room_bytes
from evener_offload.passing_part import part_for
from evener_offload.passing_slots import slots_of
from evener_offload.residents import Residents


def keys(part: str = "25", rows: int = 2, **more: Any) -> dict[str, Any]:
    """Few slots, and a part that passes in captured steps of two rows or more."""
    return {"infer.resident_experts": 8, "offload.host_when_sooner": "auto", "offload.pass_experts": part,
            "offload.pass_experts_rows": rows, **more}  # fmt: skip


def passing(controller: Controller) -> CapturedPassing:
    found = placed(controller)._passing
    assert found is not None
    return found


def step_bytes(controller: Controller) -> int:
    """Bytes that pass in each captured step of enough rows."""
    return sum(each.nbytes * each.count for each in slotted(passing(controller)))


@pytest.mark.parametrize(
    ("family", "part", "sets"),
    [
        ("Qwen3Moe", "25", 3),
        ("GptOss", "50", 2),
        ("Mixtral", "40", 3),
        *(pytest.param(family, "30", sets, marks=pytest.mark.slow) for family in CAPTURED for sets in (1, 2, 9)),
    ],
)
def test_passing_experts_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, family: str, part: str, sets: int
) -> None:
    """With chunks, preemption, prefix hits and aborts together: eager steps change what is in slots between captured
    ones, and give slots to passing experts, too."""
    monkeypatch.setattr(passing_slots, "SETS", sets)
    monkeypatch.setattr(choice_counts, "_PART", 100.0)  # copies on this chip take long beside its steps
    want, layers = on_the_cpu(family), FAMILIES[family][1]
    without = explain(configured(family, **keys("off")))["memory"]
    controller, ready = build_controller(configured(family, **keys(part)))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    stats, step = controller.scheduler.stats, step_bytes(controller)
    assert stats.preemptions and stats.counters["expert_exchanges"] > 3
    passed, steps = (stats.counters[f"host_expert_{name}"] for name in ("passed_bytes", "captured_steps"))
    assert 5 * step < passed < steps * step and passed % step == 0, "steps of one row move none"
    assert f"of 2 rows or more: {part}%, in {min(sets, layers)} sets of slots" in "\n".join(ready.info.manifest.notes)
    # The sets are part of the memory plan, and the host has no expert once more.
    memory, layer = ready.info.memory, slotted(passing(controller))[0]
    alignment = chip(controller).capabilities.alignment
    rooms = min(sets, layers) * room_bytes(layer.count * layer.nbytes, layer.count, alignment)
    assert memory.measured_weights == memory.weights == without["weights"] + rooms
    assert memory.measured_host == memory.host == without["host"]


def test_the_host_reads_neither_experts_in_slots_nor_passing_ones(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads is counted; in steps of one row, which pass nothing, it reads passing experts, too."""
    monkeypatch.setattr(choice_counts, "_PART", 100.0)
    controller, _ = build_controller(configured(**keys()))
    experts, layers = captured(controller)._captured, list(placed(controller).layer.values())
    call, seen, number = experts._call, list[tuple[bool, int, int, float]](), 0

    def watched(begins: bool, compute: Any, nbytes: int, ids: Any, copies: Any, passed: int = 0) -> None:
        nonlocal number
        number, before = 0 if begins else number + 1, experts.work.read_bytes
        call(begins, compute, nbytes, ids, copies, passed)
        rows = experts._progress.rows
        needed = np.unique(ids[: len(ids) if rows is None else rows])
        held = [each for each in layers[number].residents.slots if each >= 24]
        rest = needed[~np.isin(needed, held) & (needed >= (24 if passed else 0))]
        seen.append((passed > 0, len(needed), len(rest), (experts.work.read_bytes - before) / nbytes))

    monkeypatch.setattr(experts, "_call", watched)
    worker_of(controller).graphs._captured.clear()
    for _ in range(2):
        seen.clear()  # the first time each step also runs once before it is captured, with the maps of an earlier one
        answers(controller, 3, 60)
        answers(controller, 1, 60)
    for passes in (True, False):
        some_of = [each[1:] for each in seen if each[0] == passes]
        assert len(some_of) > 50 and all(rest == read for _, rest, read in some_of)
        assert any(rest < needed for needed, rest, _ in some_of)


def test_the_host_s_kernels_answer_for_the_rest_by_themselves(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know only addresses, so maps change where they are."""
    monkeypatch.setattr(choice_counts, "_PART", 100.0)
    want = answers(build_controller(configured())[0], 3, 60)
    controller, _ = build_controller(configured(**keys()))
    asking = captured(controller)._captured._exchanges = Asking(chip(controller))
    assert answers(controller, 3, 60) == want and len(asking.states) > 100
    step = step_bytes(controller)
    assert counted(controller, "passed_bytes") > 30 * step and counted(controller, "passed_bytes") % step == 0
    assert captured(controller).exchanged > 10


def test_copies_are_part_of_captures(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay fills the slots of a set, though nobody submits copies."""
    controller, _ = build_controller(configured(**keys()))
    want = answers(controller, 2)
    before, copy = counted(controller, "passed_bytes"), ExpertSlots.copy
    slots = [each for layer in slotted(passing(controller)) for each in layer.slots]

    def refused(each: ExpertSlots, expert: int, slot: int, count: int = 1) -> None:
        assert each not in slots, "a copy is submitted"
        copy(each, expert, slot, count)

    monkeypatch.setattr(ExpertSlots, "copy", refused)
    with torch.inference_mode():
        for each in slots:
            map_tensors(each.value.data, lambda tensor: tensor.fill_(float("nan")))
    assert answers(controller, 2) == want
    assert counted(controller, "passed_bytes") > before


def test_no_passing_expert_gets_a_slot_for_later_steps(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an eager step has left in a slot leaves it first."""
    monkeypatch.setattr(choice_counts, "_PART", 100.0)
    controller, _ = build_controller(configured(**keys(part="50")))
    layers, seen = list(placed(controller).layer.values()), 0
    exchange = Residents.exchange

    def watched(held: Residents, pairs: Any) -> Any:
        nonlocal seen
        pairs, left = list(pairs), sum(each < 48 for each in held.slots)
        assert held.passing == 48 and all(expert >= 48 for expert, _ in pairs)
        leaving = [leaves for _, leaves in pairs]
        assert sum(each is not None and each < 48 for each in leaving) >= min(
            left, len(leaving) - leaving.count(None)
        )  # fmt: skip
        seen += left
        return exchange(held, pairs)

    monkeypatch.setattr(Residents, "exchange", watched)
    answers(controller, 3, 90)
    assert captured(controller).exchanged > 10 and seen, "the prompt has left some"
    assert not any(expert < 48 for layer in layers for expert in layer.residents.slots)


def test_passing_experts_leave_slots_first_and_are_not_learned() -> None:
    held = Residents(4)
    held.passing = 3
    held.waves([0, 1, 7, 8], together=True)
    assert not held.learn(2, [8]).slots
    (wave,) = held.waves([8, 9], together=True)
    assert wave.slots == {8: 3, 9: 0} and sorted(held.slots) == [1, 7, 8, 9]
    assert held.learn(5, [8, 9]).slots == {5: 1}, "1 leaves before 7, which was used as long ago"


def test_without_steps_of_so_many_rows_any_expert_gets_a_slot(configured: Configured) -> None:
    """No engine here has more than four requests."""
    controller, _ = build_controller(configured(**keys(rows=5)))
    assert_some(play(controller, **some()), on_the_cpu())
    assert not counted(controller, "passed_bytes") and counted(controller, "captured_steps") > 10
    assert all(layer.residents.passing == 0 for layer in placed(controller).layer.values())


def test_prompts_captured_but_for_experts_change_no_token(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (slot_products, resident_experts):
        monkeypatch.setattr(module, "MOST_TOKENS", 8)
    controller, _ = build_controller(configured(**keys()))
    capture_prompts(controller)
    shrink(controller, FEW_BLOCKS["Qwen3Moe"])
    assert_same(play(controller, **traffic()), on_the_cpu())
    assert counted(controller, "captured_prompts") > 3 and counted(controller, "passed_bytes") > 0


def test_measured_costs_decide_how_many_pass_in_steps_of_each_size(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other sizes have maps of their own. The host is timed with the experts that have no slots."""
    parts, seen = [0.1, 0.3, 0.004], list[tuple[float, ...]]()

    def part(*costs: float) -> float:
        seen.append(costs)
        return parts[(len(seen) - 1) % 3]

    monkeypatch.setattr(passing_part, "part_for", part)
    controller, ready = build_controller(configured(**keys("auto", 1)))
    assert_same(play(controller, **traffic()), on_the_cpu())
    assert len(seen) == len(passing(controller).part.known) > 1
    assert all(every == pytest.approx(host * 96 / 88) for _, host, _, every in seen)
    assert all(layer.residents.passing == 29 for layer in placed(controller).layer.values()), "the most of all"
    assert counted(controller, "passed_bytes") > 0
    assert "or more: measured costs decide how many" in "\n".join(ready.info.manifest.notes)


def test_host_and_link_end_together() -> None:
    """Qwen3-30B-A3B in Q4_K_M with 72 of 128 experts in slots of an H200, and 16 requests: milliseconds. The host reads
    what is chosen of 56, and copies of these take 145."""
    every = 50.6 * 128 / 56
    part = part_for(copying=145 * 128 / 56, host=50.6, other=11.0, every=every)
    link = part * 145 * 128 / 56
    assert link == pytest.approx(50.6 - part * every + 11.0) and link == pytest.approx(45.7, abs=0.1)
    assert round(128 * part) == 18
    assert [slots_of(128, percent, 72) for percent in (1, 15, 50, None)] == [1, 19, 56, 22]


def test_auto_leaves_room_for_the_sets(configured: Configured) -> None:
    roomy = {"infer.max_reqs": 16, "offload.host_when_sooner": "auto", "infer.resident_experts": "auto"}
    every = explain(configured(**{"infer.max_reqs": 16}))["memory"]
    each = 3 * 3 * 64 * 50 * 4  # bytes of one expert of all three layers
    memory = int((every["total"] - 40 * each) / 0.95) + 2 + 2**30 - every["free"]
    counts = []
    for part in ("off", "20"):
        found = explain(configured(**roomy, **{"simulated.memory": memory, "offload.pass_experts": part}))
        counts.append(found["config"]["infer.resident_experts"]["value"])
        assert found["memory"]["problem"] is None
    assert counts[0] - 22 <= counts[1] < counts[0] - 18, "a set is a third of as many experts of all layers"


@pytest.mark.parametrize(
    "more", [{"offload.host_when_sooner": "off"}, {"infer.use_cuda_graph": False}, {"simulated.host_calls": False}]
)
def test_where_nothing_can_pass_the_manifest_says_why(configured: Configured, more: dict[str, Any]) -> None:
    controller, ready = build_controller(configured(**{**keys(), **more}))
    assert placed(controller)._passing is None
    assert "pass through the device in decode steps: steps are not captured" in "\n".join(ready.info.manifest.notes)


@pytest.mark.parametrize(("part", "rows"), [("51", 8), ("20", 0)])
def test_wrong_values_are_refused(configured: Configured, part: str, rows: int) -> None:
    with pytest.raises(ConfigError, match=r"offload\.pass_experts"):
        build_controller(configured(**keys(part, rows)))
