"""Experts of host layers that pass through the device in captured steps of the simulated chip, while the host computes
the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_families import (
    FAMILIES,
    FEW_BLOCKS,
    Configured,
    assert_auto_leaves_room_for_slots,
    blocks_of,
    draw_biases,
    on_the_cpu,
    worker_of,
)
from harsh_traffic import LIMITS, assert_same, assert_some, shrink, some, traffic
from test_captured_experts import Asking, chip, placed
from test_packed_host_experts import q4_k_m_experts

from evener.config import from_overrides
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain
from evener_offload import choice_counts, passing_part, passing_slots
from evener_offload.captured_experts import CapturedExperts
from evener_offload.captured_passing import CapturedPassing
from evener_offload.expert_slots import ExpertSlots, map_tensors, room_bytes
from evener_offload.passing_part import parse_part, part_for
from evener_offload.passing_slots import PassingLayer, slots_of

#: Families whose decode steps this chip captures: not those with latent attention.
CAPTURED = ("Qwen3Moe", "GptOss", "Mixtral")


def keys(family: str = "Qwen3Moe", part: str = "12", rows: int = 2, **more: Any) -> dict[str, Any]:
    """All host layers pass a part in captured steps of two rows or more."""
    return {"infer.cpu_layer_num": FAMILIES[family][1], "offload.pass_experts": part,
            "offload.pass_experts_rows": rows, **more}  # fmt: skip


def passing(controller: Controller) -> CapturedPassing:
    found = placed(controller)._passing
    assert found is not None
    return found


def slotted(found: CapturedPassing) -> Sequence[PassingLayer]:
    """The layers whose experts are copied to slots."""
    assert found._copies is not None
    return found._copies._slots.order


def counted(controller: Controller, name: str) -> int:
    place = worker_of(controller).assembly.placement
    assert place is not None
    return place.counters()[f"host_expert_{name}"]


def answers(controller: Controller, count: int, tokens: int = 20) -> list[list[int]]:
    """The answers to so many requests at once."""
    asked = [NewRequest(id=str(n), prompt=[7, 8, 9 + n], max_tokens=tokens, sampling=Sampling(temperature=0.0))
             for n in range(count)]  # fmt: skip
    result = play(controller, asked)
    assert not result.dead
    return [result.tokens[each.id] for each in asked]


def tensors_of(value: Any) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    map_tensors(value.data, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize(
    ("family", "part", "sets"),
    [
        ("Qwen3Moe", "12", 2),
        ("GptOss", "40", 3),
        *(pytest.param(family, "25", sets, marks=pytest.mark.slow) for family in CAPTURED for sets in (1, 2, 3, 9)),
    ],
)
def test_passing_experts_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, family: str, part: str, sets: int
) -> None:
    """With chunks, preemption, prefix hits and aborts together; with three sets or more, the most chosen ones pass."""
    monkeypatch.setattr(passing_slots, "SETS", sets)
    monkeypatch.setattr(choice_counts, "_PART", 100.0)  # exchanges on this chip take long beside its steps
    want, layers = on_the_cpu(family), FAMILIES[family][1]
    once = explain(configured(family, **{"infer.cpu_layer_num": layers}))["memory"]
    more = {"offload.pass_most_chosen": sets >= 3}
    controller, ready = build_controller(configured(family, **keys(family, part, **more)))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    stats, found = controller.scheduler.stats, passing(controller)
    assert stats.preemptions and stats.counters["host_expert_captured_steps"] > 10
    step = sum(each.nbytes * each.count for each in slotted(passing(controller)))
    passed = stats.counters["host_expert_passed_bytes"]
    assert passed > 5 * step and passed % step == 0, "each such step moves the same bytes"
    assert passed < stats.counters["host_expert_captured_steps"] * step, "steps of one row move none"
    note = f"in captured steps of 2 rows or more: {part}%, in {min(sets, layers)} sets of slots"
    assert note in "\n".join(ready.info.manifest.notes)
    # Slots and biases are part of the memory plan.
    memory, layer = ready.info.memory, slotted(passing(controller))[0]
    biases = sum(
        each.value.nbytes for both in found._biases.values() for each in both if each and each.value is not None
    )
    rooms = min(sets, layers) * room_bytes(
        layer.count * layer.nbytes, layer.count, chip(controller).capabilities.alignment
    )  # fmt: skip
    assert memory.measured_weights == memory.weights == once["weights"] + rooms + biases
    assert (biases > 0) == (family == "GptOss"), "products on the device read biases there"


def test_latent_attention_makes_no_difference(configured: Configured) -> None:
    """This chip does not capture it, so steps are submitted as for a capture, and run at once."""
    controller, _ = build_controller(configured("DeepseekV3", **keys("DeepseekV3", "25")))
    shrink(controller, FEW_BLOCKS["DeepseekV3"])
    worker_of(controller).runner.eager_forward = None
    assert_same(play(controller, **traffic()), on_the_cpu("DeepseekV3"))
    step = sum(each.nbytes * each.count for each in slotted(passing(controller)))
    assert counted(controller, "passed_bytes") > 10 * step and counted(controller, "passed_bytes") % step == 0


def test_biases_are_those_of_the_passing_experts(configured: Configured) -> None:
    found = []
    for more in ({}, keys("GptOss", "40")):
        controller, _ = build_controller(configured("GptOss", **{"infer.cpu_layer_num": 4, **more}))
        blocks = blocks_of(worker_of(controller).assembly.build)
        with torch.inference_mode():
            draw_biases(blocks, torch.Generator().manual_seed(5))
            for site, weights in blocks if more else ():
                there = passing(controller)._biases[site.path]
                for copy, bias in zip(there, (weights.gate_up_bias, weights.down_bias), strict=True):
                    assert copy is not None and copy.value is not None
                    copy.value.copy_(bias.to("simulated"))
        found.append(answers(controller, 3))
        assert not more or counted(controller, "passed_bytes") > 0
    assert found[0] == found[1]


def test_the_host_reads_no_passing_expert(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, _ = build_controller(configured(**keys(part="50")))
    captured, chosen = placed(controller)._captured, list[np.ndarray[Any, Any]]()
    call = captured._call

    def watched(
        begins: bool,
        compute: Any,
        nbytes: int,
        ids: np.ndarray[Any, Any],
        copies: np.ndarray[Any, Any],
        passed: int = 0,
    ) -> None:
        before = captured.work.read_bytes
        call(begins, compute, nbytes, ids, copies, passed)
        if passed:
            rows = captured._progress.rows
            needed = np.unique(ids[: len(ids) if rows is None else rows])
            chosen.append(needed)
            assert captured.work.read_bytes - before == nbytes * np.count_nonzero(copies[needed])
            assert copies.sum() == 48

    monkeypatch.setattr(captured, "_call", watched)
    answers(controller, 3)
    read = placed(controller)._expert_bytes
    asked = sum(map(len, chosen)) * next(iter(read.values()))
    assert len(chosen) > 20 and captured.work.read_bytes < asked, "some that pass are chosen"


def test_the_host_s_kernels_answer_for_the_others_by_themselves(configured: Configured) -> None:
    want = answers(build_controller(configured())[0], 3)
    controller, _ = build_controller(configured(**keys(part="25")))
    asking = placed(controller)._captured._exchanges = Asking(chip(controller))
    assert answers(controller, 3) == want and len(asking.states) > 30
    step = sum(each.nbytes * each.count for each in slotted(passing(controller)))
    assert counted(controller, "passed_bytes") > 10 * step and counted(controller, "passed_bytes") % step == 0


def test_copies_are_part_of_captures(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay fills the slots, though nobody submits copies."""
    controller, _ = build_controller(configured(**keys(part="25")))
    want = answers(controller, 2)
    before = counted(controller, "passed_bytes")

    def refused(slots: ExpertSlots, expert: int, slot: int, count: int = 1) -> None:
        raise AssertionError("a copy is submitted")

    monkeypatch.setattr(ExpertSlots, "copy", refused)
    with torch.inference_mode():
        for layer in slotted(passing(controller)):
            for each in layer.slots:
                map_tensors(each.value.data, lambda tensor: tensor.fill_(float("nan")))
    assert answers(controller, 2) == want
    assert counted(controller, "passed_bytes") > before


def test_the_first_copies_wait_for_the_beginning_of_the_step_alone(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of the device, which come first, run beside them. The first time, the beginning is not known yet."""
    controller, _ = build_controller(configured(**keys(**{"infer.cpu_layer_num": 1})))
    found, log = passing(controller)._copies, list[str]()
    assert found is not None
    event, begin = found._event, found.begin
    sites = worker_of(controller).assembly.build.sites
    layer = next(site for site in sites if ".0." in site.path and site.op != "embedding")

    def noted() -> Any:
        log.append("event")
        return event()

    def logged(run: Any) -> Any:
        def logging(*inputs: Any) -> Any:
            log.append("layer 0")
            return run(*inputs)

        return logging

    def began(bucket: Any) -> None:
        log.append("known" if found._begun is not None else "not known")
        begin(bucket)

    layer.table = tuple(map(logged, layer.table))
    monkeypatch.setattr(found, "_event", noted)
    monkeypatch.setattr(found, "begin", began)
    answers(controller, 2, 3)
    assert log[0] != "known" and log.count("not known") == 1
    at = log.index("known")
    assert log.index("not known") < at and log[at - 2 : at] == ["event", "layer 0"], (
        "noted before layer 0 was submitted"
    )


@pytest.mark.parametrize("rows", [8, 5])
def test_steps_of_fewer_rows_are_the_host_s(configured: Configured, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """No engine here has more than four requests."""
    starts = list[int]()
    start = CapturedExperts.start

    def noted(self: CapturedExperts, path: str, compute: Any, nbytes: int, *inputs: Any) -> Any:
        starts.append(inputs[4] if len(inputs) > 4 else 0)
        return start(self, path, compute, nbytes, *inputs)

    monkeypatch.setattr(CapturedExperts, "start", noted)
    controller, _ = build_controller(configured(**keys(rows=rows)))
    assert_some(play(controller, **some()), on_the_cpu())
    assert starts and not any(starts) and not counted(controller, "passed_bytes")


@pytest.mark.parametrize("value", ["0", "51", "-1", "ten", "٣", "1.5"])
def test_a_part_that_is_none_is_refused(configured: Configured, value: str) -> None:
    text = f"offload.pass_experts='{value}': set auto, off, or the percent of a layer's experts, from 1 to 50"
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        parse_part(value)
    with pytest.raises(ConfigError, match="set auto, off, or the percent"):
        build_controller(configured(**keys(part=value)))


def test_rows_below_one_are_refused(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"offload\.pass_experts_rows=0: set the rows of the smallest such step"):
        build_controller(configured(**keys(rows=0)))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"infer.use_cuda_graph": False}, "steps are not captured"),
        pytest.param({"simulated.host_calls": False}, "steps are not captured", marks=pytest.mark.slow),
    ],
)
def test_where_nothing_can_pass_the_manifest_says_why(configured: Configured, more: dict[str, Any], why: str) -> None:
    controller, ready = build_controller(configured(**keys(**more)))
    assert placed(controller)._passing is None
    assert f"pass through the device in decode steps: {why}" in "\n".join(ready.info.manifest.notes)


def test_layers_of_unlike_layouts_use_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Q4_K_M file has down projections of some layers in Q6_K. This chip multiplies by neither, so all are of one
    layout if nobody says otherwise."""
    monkeypatch.setattr(passing_slots, "SETS", 1)
    monkeypatch.setattr(passing_slots, "kind_of", lambda found: found[0].name)
    model = q4_k_m_experts("Qwen3Moe", tmp_path)
    base = {**LIMITS, "dtype": "float32", "infer.threads": 1}
    on_cpu = from_overrides(model, {**base, "backend": "cpu", "infer.block_size": 128})
    want = play(build_controller(on_cpu)[0], **traffic())
    chip_keys = {**base, "backend": "simulated", "offload.stream_prompts": "off", **keys(part="50")}
    controller, ready = build_controller(from_overrides(model, {**chip_keys, "infer.cpu_layer_num": 2}))
    assert_same(play(controller, **traffic()), want)
    assert counted(controller, "passed_bytes") > 0
    assert placed(controller).streamed.second_bytes > 0, "host memory has the experts twice"
    first, second = ([tensors_of(each.value) for each in layer.slots] for layer in slotted(passing(controller)))
    assert [[t.data_ptr() for t in each] for each in first] == [[t.data_ptr() for t in each] for each in second]
    memory = ready.info.memory
    assert memory.measured_weights == memory.weights and memory.measured_host == memory.host


def test_slots_of_streamed_prompts_are_others(configured: Configured) -> None:
    """Prompts of eight tokens or more are streamed, between captured steps in which experts pass."""
    controller, _ = build_controller(configured(**keys(part="25", **{"offload.stream_prompts": "8"})))
    assert_same(play(controller, **traffic()), on_the_cpu())
    assert counted(controller, "passed_bytes") > 0 and counted(controller, "streamed_tokens") > 0


def test_host_and_link_end_together() -> None:
    """Qwen3-30B-A3B in Q4_K_M with 21 of 48 layers on the host of an H200, and 16 requests: milliseconds."""
    part = part_for(copying=146 / 21, host=60.5 / 21, other=7.6 / 21)
    assert 146 * part == pytest.approx(60.5 * (1 - part) + 7.6) and 146 * part == pytest.approx(48.2, abs=0.1)
    assert [slots_of(128, percent) for percent in (1, 33, None)] == [1, 42, 51] and slots_of(8, 1) == 1


@pytest.mark.parametrize(("found", "count"), [(0.3, 29), (0.9, 38), (0.004, 0)])
def test_measured_costs_decide_how_many_pass(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, found: float, count: int
) -> None:
    """As many as have slots at most; the chip computes on the host, so what is measured there says nothing."""
    seen = list[tuple[float, ...]]()

    def part(*costs: float) -> float:
        seen.append(costs)
        return found

    monkeypatch.setattr(passing_part, "part_for", part)
    controller, ready = build_controller(configured(**keys(part="auto")))
    assert answers(controller, 3) == answers(build_controller(configured())[0], 3)
    assert seen and all(cost > 0 for costs in seen for cost in costs)
    assert len(seen) == len(passing(controller).part.known), "each size of steps is measured once"
    step = sum(each.nbytes for each in slotted(passing(controller))) * count
    passed = counted(controller, "passed_bytes")
    assert passed % step == 0 and passed > 0 if count else not passed
    assert "or more: measured costs decide how many" in "\n".join(ready.info.manifest.notes)


def test_auto_leaves_room_for_the_slots(configured: Configured) -> None:
    assert_auto_leaves_room_for_slots(configured, "offload.pass_experts", "20")


def test_the_most_chosen_experts_pass(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take their places between steps, and no token changes."""
    monkeypatch.setattr(choice_counts, "_PART", 100.0)  # exchanges on this chip take long beside its steps
    controller, ready = build_controller(configured(**keys(part="25", **{"offload.pass_most_chosen": True})))
    assert all(len(layer.stages) == 2 for layer in slotted(passing(controller))), "no page is locked in a step"
    assert answers(controller, 3, 90) == answers(build_controller(configured())[0], 3, 90)
    found = passing(controller).most_chosen
    assert found is not None and found.exchanged > 10
    assert "in 3 sets of slots, the most chosen ones" in "\n".join(ready.info.manifest.notes)
    for layer, places, row in zip(found._layers, found._places, found.counts.scores, strict=True):
        assert sorted(places.expert_at) == list(range(layer.experts))
        count = passing(controller).part.most(layer)
        assert row[places.expert_at[:count]].mean() > row[places.expert_at[count:]].mean()
        for slots, stage in zip(layer.slots, layer.stages, strict=True):
            for place in range(layer.count):
                held = slots.parts(layer.first + int(places.expert_at[place]), 1)
                assert all(map(torch.equal, stage._range(place, 1), held))


def test_an_expert_gets_a_place_if_it_was_chosen_clearly_more_often(configured: Configured) -> None:
    controller, _ = build_controller(configured(**keys(part="25", **{"offload.pass_most_chosen": True})))
    answers(controller, 3)
    found = passing(controller).most_chosen
    assert found is not None
    found.counts.scores[:] = 10.0
    assert found._worth() == []
    (places, layer), count = (found._places[0], found._layers[0]), passing(controller).part.most(found._layers[0])
    come, go = places.expert_at[[count + 3, 2]]
    found.counts.scores[0, [come, go]] = 40.0, 2.0
    (worth,) = found._worth()[:1]
    assert worth == (38.0, layer.number, count + 3, 2)
    with torch.inference_mode():  # as steps are
        found.review()
    assert places.expert_at[[count + 3, 2]].tolist() == [go, come]
    slots, copies = (found._device.readback(each).wait() for each in places.on_device(count))
    assert slots[[come, go], 0].tolist() == [2, -1] and copies[[come, go]].tolist() == [1, 0]
    slots, copies = places.on_host(count)
    assert slots[[come, go], 0].tolist() == [-1, go] and copies[[come, go]].tolist() == [0, 1]


def test_without_room_in_host_memory_the_first_experts_pass(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassingLayer, "stage_bytes", 1 << 50)
    controller, ready = build_controller(configured(**keys(part="25", **{"offload.pass_most_chosen": True})))
    assert answers(controller, 3) == answers(build_controller(configured())[0], 3)
    assert passing(controller).most_chosen is None and counted(controller, "passed_bytes") > 0
    assert "in 3 sets of slots, the first ones" in "\n".join(ready.info.manifest.notes)
    assert not any(layer.stages for layer in slotted(passing(controller)))
