"""The memory plan: what fits, what does not, and the words for it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from evener.contracts.device import MemoryInfo
from evener.engine.messages import NewRequest
from evener.engine.start import build_controller
from evener.errors import MemoryPlanError
from evener.testing.reference_device import HostDevice
from evener.testing.reference_engine import play


def test_a_model_that_cannot_fit_is_refused_before_a_weight_is_made_with_the_numbers(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.engine.worker.load_dummy", lambda *_: pytest.fail("weights were made"))
    giant = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 80}
    with pytest.raises(MemoryPlanError) as error:
        build_controller(make_config("Llama", giant))
    message = str(error.value)
    assert re.search(r"does not fit: \d+\.\d\d GiB for weights", message) and "8.00 GiB are free" in message
    assert "infer.max_seq_len=128" in message and "lower" in message and "weights  " in message


def test_state_that_is_too_small_for_one_request_is_refused_with_what_to_change(make_config: Any) -> None:
    long = {"max_position_embeddings": 100_000}
    with pytest.raises(MemoryPlanError) as error:
        build_controller(make_config("Llama", long, **{"infer.max_seq_len": 100_000, "infer.kv_memory": 2**20}))
    message = str(error.value)
    for word in ("infer.max_seq_len=50000", "infer.kv_memory", "100000"):
        assert word in message


def test_weights_are_estimated_to_the_byte_that_is_held(make_config: Any) -> None:
    for family in ("Llama", "Gemma3"):
        _, ready = build_controller(make_config(family))
        memory: Any = ready.info["memory"]
        assert memory["measured_weights"] == pytest.approx(memory["weights"], rel=0.05)
        assert memory["total"] <= 8 << 30 and memory["state"] == memory["blocks"] * memory["block_bytes"]


def test_a_pool_for_one_longest_request_serves_it_and_others_after_it(make_config: Any, shrink_pool: Any) -> None:
    controller, _ = build_controller(make_config())
    shrink_pool(controller, 8)
    messages = [NewRequest(id=str(i), prompt=list(range(60 + 20 * i)), max_tokens=28 - i) for i in range(3)]
    played = play(controller, messages)
    assert set(played.reasons().values()) == {"length"} and controller.scheduler.state.pool.used == 0


def test_on_a_device_with_memory_of_its_own_state_takes_what_a_warm_up_leaves(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([2 << 20, 2 << 20, 1 << 20])  # asked for the options, for the plan, and after the warm-up
    plain = HostDevice.__init__

    def apart(device: HostDevice, index: int) -> None:
        plain(device, index)
        device.capabilities = replace(device.capabilities, host_memory=False)

    monkeypatch.setattr(HostDevice, "__init__", apart)
    monkeypatch.setattr(HostDevice, "memory", lambda _: MemoryInfo(next(free), 2 << 20))
    keys = {"infer.kv_memory": "auto", "infer.max_reqs": 64, "infer.step_tokens": 64}
    controller, ready = build_controller(make_config(**keys))
    memory: Any = ready.info["memory"]
    assert memory["blocks"] == int(0.95 * (1 << 20)) // memory["block_bytes"] == controller.scheduler.state.pool.count
    played = play(controller, [NewRequest(id="a", prompt=list(range(40)), max_tokens=8)])
    assert played.reasons() == {"a": "length"}
