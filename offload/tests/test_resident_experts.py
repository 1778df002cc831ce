"""Experts that the device computes although it does not hold all: the tokens of one that does."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, HEADS, Configured, on_the_cpu, worker_of
from harsh_traffic import LIMITS, assert_same, shrink, traffic

from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import GetStats
from evener.errors import ConfigError, MemoryPlanError
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play, small_config
from evener_inspection.explanation import explain
from evener_offload.resident_experts import ResidentExperts


def placement_of(controller: Any) -> ResidentExperts:
    found = worker_of(controller).assembly.placement
    assert isinstance(found, ResidentExperts)
    return found


@pytest.mark.parametrize(
    "family", [f if f in ("Qwen3Moe", "DeepseekV3") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_few_slots_for_experts_give_the_tokens_of_a_device_that_holds_all(configured: Configured, family: str) -> None:
    """With chunks, preemption, prefix hits and aborts together; steps of prompts need several waves."""
    want, every = on_the_cpu(configured, family), explain(configured(family))["memory"]
    few = explain(configured(family, **{"infer.resident_experts": 8}))["memory"]
    small = {"simulated.memory": (every["total"] + few["total"]) // 2}
    with pytest.raises(MemoryPlanError, match="does not fit"):
        build_controller(configured(family, **small))
    controller, ready = build_controller(configured(family, **small, **{"infer.resident_experts": 8}))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    assert controller.scheduler.stats.preemptions and controller.scheduler.state.pool.used == 0
    memory = ready.info.memory
    assert memory["measured_weights"] == memory["weights"] == few["weights"]
    assert memory["measured_host"] == memory["host"] > 0.5 * every["weights"]
    layers = placement_of(controller).layer.values()
    assert len(layers) == FAMILIES[family][1] and all(layer.residents.hits for layer in layers)


def test_only_the_layers_that_are_named_leave_the_device(configured: Configured) -> None:
    want = on_the_cpu(configured)
    for keys, layers in (({"infer.cpu_layer_num": 1}, (2,)), ({"infer.host_experts": "0-1"}, (0, 1))):
        controller, ready = build_controller(configured(**{"infer.resident_experts": 12, **keys}))
        assert_same(play(controller, **traffic()), want)
        assert placement_of(controller).layers == layers
        shown = ",".join(map(str, layers)).replace(",", "-")
        assert f"12 experts of each of {len(layers)} layers are on the device, the others in host memory: {shown}" in (
            ready.info.manifest["notes"]
        )


@pytest.mark.slow
def test_two_ranks_have_slots_for_their_parts_of_experts(configured: Configured) -> None:
    want = on_the_cpu(configured)
    with rank_threads(configured(**{"infer.tp_size": 2, "infer.resident_experts": 8})) as (controller, ranks):
        assert_same(play(controller, **traffic()), want)
        for worker in ranks.workers:
            assert worker.facts.info.memory["measured_weights"] == worker.facts.info.memory["weights"]


def test_auto_keeps_as_many_experts_on_the_device_as_fit(configured: Configured) -> None:
    roomy = {"infer.max_reqs": 16}  # random weights need 4 MiB while they are loaded; state is allocated after them
    gc.collect()
    every = explain(configured(**roomy))["memory"]
    each = 3 * 3 * 64 * 50 * 4  # bytes of one expert of all three layers
    taken = 2**30 - every["free"]  # by engines of earlier tests
    for lacking, residents in ((0, 0), (10 * each, 86), (40 * each, 56)):
        memory = int((every["total"] - lacking) / 0.95) + 2 + taken
        config = configured(**roomy, **{"infer.resident_experts": "auto", "simulated.memory": memory})
        found = explain(config)
        value, reason = found["config"]["infer.resident_experts"].values()
        assert abs(value - residents) <= 1 and reason == "what fits into the device's memory"
        assert found["memory"]["problem"] is None
    controller, _ = build_controller(config)
    assert not play(controller, traffic()["messages"][:2]).dead


def test_what_was_needed_and_copied_is_in_the_statistics(configured: Configured) -> None:
    controller, _ = build_controller(configured(**{"infer.resident_experts": 24}))
    assert not play(controller, **traffic()).dead
    (report,) = controller.handle([GetStats()])
    layers = placement_of(controller).layer.values()
    bytes_of_one = 3 * 64 * 50 * 4
    assert report.counters == {
        "expert_hits": sum(layer.residents.hits for layer in layers),
        "expert_misses": sum(layer.residents.misses for layer in layers),
        "expert_copied_bytes": sum(layer.residents.misses for layer in layers) * bytes_of_one,
    }
    assert report.counters["expert_hits"] > 100 and report.counters["expert_misses"] > 100


def test_the_next_experts_are_copied_on_their_own_stream_while_a_wave_is_computed(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies for a wave wait for the wave before the last, and a wave for its own copies."""
    controller, _ = build_controller(configured(**{"infer.resident_experts": 8}))
    device, placement = worker_of(controller).assembly.device, placement_of(controller)
    log: list[str] = []
    computed = 0

    class Event:
        def __init__(self) -> None:
            nonlocal computed
            self.name = "copied" if "enter" in log[-1:] or log[-1:] == ["copy"] else f"computed {computed}"

        def record(self) -> None:
            log.append(f"record {self.name}")

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

    class Stream:
        def __enter__(self) -> None:
            log.append("enter")

        def __exit__(self, *_: Any) -> None:
            log.append("leave")

    monkeypatch.setattr(device, "new_event", Event)
    monkeypatch.setattr(placement, "_stream", Stream())
    upload = device.upload

    def uploaded(array: Any) -> torch.Tensor:
        log.append("upload")
        return upload(array)

    monkeypatch.setattr(device, "upload", uploaded)
    assert not play(controller, traffic()["messages"][:1]).dead
    text = " | ".join(log)
    assert re.search(r"enter \| record copied \| leave \| wait copied \| upload \| record computed 0 \| enter", text)
    assert "wait computed" in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"infer.resident_experts": 96}, "infer.resident_experts=96: a layer has 96 experts, so all fit; leave it out"),
        ({"infer.resident_experts": -2}, "infer.resident_experts"),
        ({"infer.resident_experts": 8, "infer.cpu_layer_num": "auto"}, "cannot be used with infer.resident_experts"),
        ({"infer.resident_experts": "auto", "infer.pp_size": 2, "executor": "inline"}, r"for several stages .* set a"),
    ],
)
def test_wrong_values_are_refused_with_what_to_type(configured: Configured, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_controller(configured(**keys))


def test_models_that_it_cannot_serve_are_refused(tmp_path: Any) -> None:
    keys = {**LIMITS, "backend": "simulated", "infer.resident_experts": 1}
    with pytest.raises(ConfigError, match=r"infer.resident_experts=1: the model has no experts; leave it out"):
        build_controller(small_config(tmp_path / "dense", "Llama", HEADS, **keys))
    with pytest.raises(ConfigError, match=r"weight the experts' inputs; use infer.cpu_layer_num alone"):
        build_controller(small_config(tmp_path / "llama4", "Llama4", {}, **keys))


def test_without_the_package_the_key_names_it(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "evener-offload")
    with pytest.raises(ConfigError, match=r"infer.resident_experts needs .*; type: pip install evener-offload"):
        build_controller(configured(**{"infer.resident_experts": 1}))
