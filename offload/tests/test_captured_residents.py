"""Captured steps with some experts of each layer on the simulated chip: the host computes the others."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from expert_families import FEW_BLOCKS, Configured, capture_prompts, on_the_cpu, refuse_in_replays, worker_of
from harsh_traffic import assert_same, assert_some, shrink, some, traffic
from test_captured_experts import Asking, chip

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import PluginError
from evener_conformance.reference.engine import play
from evener_offload import choice_counts, resident_experts, slot_products
from evener_offload.captured_residents import CapturedResidents
from evener_offload.resident_experts import ResidentExperts

KEYS = {"infer.resident_experts": 8, "offload.host_when_sooner": "auto"}


def placed(controller: Controller) -> ResidentExperts:
    place = worker_of(controller).assembly.placement
    assert isinstance(place, ResidentExperts)
    return place


def captured(controller: Controller) -> CapturedResidents:
    found = placed(controller).captured
    assert found is not None
    return found


@pytest.mark.parametrize(
    "family",
    ["Qwen3Moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("GptOss", "Mixtral"))],
)
def test_captured_steps_give_the_tokens_of_a_device_that_holds_all(configured: Configured, family: str) -> None:
    """With chunks, preemption, prefix hits and aborts together: eager steps change what is in slots between them."""
    want = on_the_cpu(family)
    controller, ready = build_controller(configured(family, **KEYS))
    shrink(controller, FEW_BLOCKS[family])
    got = play(controller, **traffic())
    assert_same(got, want)
    stats = controller.scheduler.stats
    assert stats.preemptions and 10 < stats.counters["host_expert_captured_steps"] < stats.steps
    assert stats.counters["host_expert_read_bytes"] > 0 and stats.counters["host_expert_microseconds"] > 0
    assert "decode steps of up to" in "\n".join(ready.info.manifest.notes)


def test_the_host_s_kernels_answer_for_the_experts_without_a_slot(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in slots changes between steps, and kernels that answer by themselves know only addresses."""
    monkeypatch.setattr(choice_counts, "_PART", 100.0)
    want = long_answer(build_controller(configured())[0], count=2)
    controller, _ = build_controller(configured(**KEYS))
    asking = captured(controller)._captured._exchanges = Asking(chip(controller))
    assert long_answer(controller, count=2) == want  # the warm-up has captured steps of one
    assert len(asking.states) > 100 and captured(controller).exchanged > 10
    monkeypatch.setattr(choice_counts, "_REVIEW", 10**9)
    place, (before, read) = placed(controller), (chosen(controller), read_experts(controller))
    assert long_answer(controller, count=2) == want
    missing = here = 0.0
    for row, layer in zip(chosen(controller) - before, place.layer.values(), strict=True):
        here += row[list(layer.residents.slots)].sum()
        missing += row.sum() - row[list(layer.residents.slots)].sum()
    assert here > 20, "some of those in slots are chosen"
    assert 0.8 * missing < read_experts(controller) - read <= missing, "an expert of both rows is read once"


def chosen(controller: Controller) -> np.ndarray[Any, Any]:
    """In how many captured steps each expert of each layer was chosen."""
    counts = captured(controller).counts._counts
    assert counts is not None
    return chip(controller).readback(counts).wait().numpy().copy()


def read_experts(controller: Controller) -> float:
    """How many experts the host has read in captured steps."""
    place = placed(controller)
    assert place.share is not None
    return place.counters()["host_expert_read_bytes"] / place.share.expert_bytes(next(iter(place.layer)))


def long_answer(controller: Controller, tokens: int = 120, count: int = 1) -> list[list[int]]:
    """The answers to ``count`` requests."""
    asked = [NewRequest(id=str(n), prompt=[7, 8, 9 + n], max_tokens=tokens, sampling=Sampling(temperature=0.0))
             for n in range(count)]  # fmt: skip
    result = play(controller, asked)
    assert not result.dead
    return [result.tokens[each.id] for each in asked]


def test_the_most_chosen_experts_take_the_slots_of_the_least_chosen_ones(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_counts, "_PART", 100.0)  # copies on this chip take long beside its steps
    want = long_answer(build_controller(configured())[0])
    controller, _ = build_controller(configured(**KEYS))
    assert long_answer(controller) == want
    exchanged = controller.scheduler.stats.counters["expert_exchanges"]
    assert exchanged > 10
    place, scores = placed(controller), captured(controller).counts.scores
    for row, layer in zip(scores, place.layer.values(), strict=True):
        held = list(layer.residents.slots)
        absent = sorted(set(range(layer.experts)) - set(held))
        assert row[held].mean() > row[absent].mean(), "those in slots were chosen more often"


def test_few_exchanges_are_made_where_copies_take_long(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_counts, "_PART", 0.0)
    controller, _ = build_controller(configured(**KEYS))
    long_answer(controller)
    assert captured(controller).exchanged == choice_counts._FIRST, "after these it is known how long one takes"


def test_an_expert_is_worth_a_slot_if_it_was_chosen_clearly_more_often(configured: Configured) -> None:
    controller, _ = build_controller(configured(**KEYS))
    long_answer(controller, 4)
    found = captured(controller)
    path, layer = next(iter(placed(controller).layer.items()))
    left_out = [each for each in range(layer.experts) if each not in layer.residents.slots]
    layer.exchange([(each, None) for each in left_out[: 8 - len(layer.residents.slots)]])
    held = list(layer.residents.slots)
    absent = [each for each in range(layer.experts) if each not in held]
    assert len(held) == 8
    found.counts.scores = np.zeros_like(found.counts.scores)
    found.counts.scores[0, held] = 10.0
    assert found._worth() == []
    found.counts.scores[0, absent[:3]] = 40.0, 50.0, 24.0
    found.counts.scores[0, held[3]] = 2.0
    (first, second) = found._worth()
    assert first == (48.0, path, absent[1], held[3])
    assert second[0] == 30.0 and second[2] == absent[0] and second[3] in held


def test_counts_that_begin_anew_are_told_apart(configured: Configured) -> None:
    """A server runs for longer than an int32 counts."""
    controller, _ = build_controller(configured(**KEYS))
    found = captured(controller)
    found.counts._seen[:] = 2**31 - 3
    with torch.inference_mode():  # as steps are
        found.counts.add(np.full_like(found.counts._seen, -(2**31) + 2))
    assert (found.counts.scores == 5).all()


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_prompts_captured_but_for_experts_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together. Prompts go on in waves, as experts exceed slots."""
    for module in (slot_products, resident_experts):
        monkeypatch.setattr(module, "MOST_TOKENS", 8)
    controller, ready = build_controller(configured(family, **KEYS))
    capture_prompts(controller)
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), on_the_cpu(family))
    counters = controller.scheduler.stats.counters
    assert counters["host_expert_captured_prompts"] > 3 and counters["host_expert_captured_steps"] > 10
    assert "single prompts of up to 24 tokens are captured but for experts" in "\n".join(ready.info.manifest.notes)


def test_larger_steps_than_are_computed_at_once_run_eagerly(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (slot_products, resident_experts):
        monkeypatch.setattr(module, "MOST_TOKENS", 1)
    controller, _ = build_controller(configured(**KEYS))
    assert_some(play(controller, **some()), on_the_cpu())
    assert "cannot be captured and runs eagerly" in caplog.text and "in steps of up to 1 rows" in caplog.text


def test_a_kernel_of_the_host_that_fails_in_a_replay_is_named(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = build_controller(configured(**KEYS))
    refuse_in_replays(monkeypatch)
    with pytest.raises(PluginError, match=r"kernel cpu/\S+ .* raised ValueError: a wrong tensor"):
        play(controller, traffic()["messages"][:2])
    with pytest.raises(PluginError, match="a wrong tensor"):
        placed(controller).counters()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"offload.host_when_sooner": "off"}, "and offload.host_when_sooner=off"),
        ({"simulated.host_calls": False}, r"and .* does not call the host \(DeviceCapabilities.host_calls\)"),
    ],
)
def test_steps_that_cannot_be_captured_run_eagerly_and_the_manifest_says_why(
    configured: Configured, keys: dict[str, Any], why: str
) -> None:
    controller, ready = build_controller(configured(**{**KEYS, **keys}))
    assert_some(play(controller, **some()), on_the_cpu())
    notes = "\n".join(ready.info.manifest.notes)
    assert re.search("steps run eagerly: experts of 3 layers are in host memory, " + why, notes), notes
    assert placed(controller).captured is None
