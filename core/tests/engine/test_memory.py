"""The memory plan: what fits, what does not, and the error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from evener.contracts.device import MemoryInfo
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest
from evener.engine.worker.memory import MemoryDemand, plan_memory
from evener.errors import CheckpointError, MemoryPlanError
from evener.frontend.settings import FrontendSettings
from evener.loading.estimate import WeightEstimate
from evener.plugins.catalog import Catalog
from evener_conformance.reference.device import HostDevice
from evener_conformance.reference.engine import play

KEYS = ("infer.max_seq_len", "infer.kv_memory")
FEW = {"infer.max_seq_len": 100_000, "infer.kv_memory": 2**20, "infer.max_reqs": 1}


def test_a_model_that_cannot_fit_is_refused_before_a_weight_is_made_with_the_numbers(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener_inspection.dummy_weights.load_dummy", lambda *_: pytest.fail("weights were made"))
    giant = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 80}
    with pytest.raises(MemoryPlanError) as error:
        build_controller(make_config("Llama", giant))
    message = str(error.value)
    assert re.search(
        r"does not fit: its weights take \d+\.\d\d GiB with compute dtype float32, and 8.00 GiB of", message
    )
    assert "dtype=bfloat16 halves them" in message and "fewer bits" in message and "weights  " in message


def test_state_that_is_too_small_for_one_request_is_refused_with_what_to_change(make_config: Any) -> None:
    long = {"max_position_embeddings": 100_000}
    with pytest.raises(MemoryPlanError) as error:
        build_controller(make_config("Llama", long, **{"infer.max_seq_len": 100_000, "infer.kv_memory": 2**20}))
    message = str(error.value)
    assert "infer.max_seq_len=100000" in message
    # What it says to type works, each by itself, and a little less does not.
    length, memory = (re.search(rf"{key}=(\d+)", message.partition("what to change")[2]) for key in KEYS)
    assert length is not None and memory is not None
    for keys in ({**FEW, "infer.max_seq_len": int(length[1])}, {**FEW, KEYS[1]: int(memory[1]) << 20}):
        build_controller(make_config("Llama", long, **keys))
    for keys in ({**FEW, "infer.max_seq_len": int(length[1]) + 16}, {**FEW, KEYS[1]: (int(memory[1]) - 1) << 20}):
        with pytest.raises(MemoryPlanError):
            build_controller(make_config("Llama", long, **keys))


def test_mapped_weights_larger_than_host_memory_are_rejected() -> None:
    demand = MemoryDemand(WeightEstimate(0, 9 << 30), 0, 0, 1 << 20, 64, 1, 16, "bfloat16")
    problem = plan_memory(demand, MemoryInfo(7 << 30, 8 << 30), None).problem
    assert (
        problem is not None
        and "weights take 9.00 GiB with compute dtype bfloat16, and 7.00 GiB of 8.00 GiB are free" in problem
    )
    assert "dtype=" not in problem
    assert plan_memory(demand, MemoryInfo(7 << 30, 12 << 30), None).problem is None


def test_too_large_a_kv_memory_is_rejected_with_the_key() -> None:
    demand = MemoryDemand(WeightEstimate(1 << 30, 0), 0, 0, 1 << 20, 1 << 20, 1, 16, "bfloat16")
    problem = plan_memory(demand, MemoryInfo(2 << 30, 2 << 30), 3 << 30).problem
    assert problem is not None and "allows 3.00 GiB for state" in problem and "lower infer.kv_memory" in problem


def test_weight_estimate_is_exact_to_the_byte(make_config: Any) -> None:
    for family in ("Llama", "Gemma3"):
        _, ready = build_controller(make_config(family))
        memory: Any = ready.info.memory
        assert memory.measured_weights == pytest.approx(memory.weights, rel=0.05)
        assert memory.total <= 8 << 30 and memory.state == memory.blocks * memory.block_bytes


def test_a_pool_for_one_longest_request_serves_it_and_others_after_it(make_config: Any, shrink_pool: Any) -> None:
    controller, _ = build_controller(make_config())
    shrink_pool(controller, 8)
    messages = [NewRequest(id=str(i), prompt=list(range(60 + 20 * i)), max_tokens=28 - i) for i in range(3)]
    played = play(controller, messages)
    assert set(played.reasons().values()) == {"length"} and controller.scheduler.state.pool.used == 0


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``leaves(n)``: the device has memory of its own, 2 MiB, of which a warm-up leaves n bytes."""
    plain = HostDevice.__init__

    def apart(device: HostDevice, index: int) -> None:
        plain(device, index)
        device.capabilities = replace(device.capabilities, host_memory=False)

    def set_free(left: int) -> None:
        free = iter([2 << 20, 2 << 20, left])  # asked for the options, for the plan, and after the warm-up
        monkeypatch.setattr(HostDevice, "__init__", apart)
        monkeypatch.setattr(HostDevice, "memory", lambda _: MemoryInfo(next(free), 2 << 20))

    return set_free


def test_on_a_device_with_its_own_memory_state_gets_what_warm_up_leaves(make_config: Any, leaves: Any) -> None:
    leaves(1 << 20)
    keys = {"infer.kv_memory": "auto", "infer.max_reqs": 64, "infer.step_tokens": 64}
    controller, ready = build_controller(make_config(**keys))
    memory: Any = ready.info.memory
    left = (1 << 20) - memory.workspace - int(0.05 * (2 << 20))
    assert memory.blocks == left // memory.block_bytes == controller.scheduler.state.pool.count
    played = play(controller, [NewRequest(id="a", prompt=list(range(40)), max_tokens=8)])
    assert played.reasons() == {"a": "length"}


def test_requests_are_shorter_where_a_warm_up_leaves_less_than_the_longest_takes(make_config: Any, leaves: Any) -> None:
    leaves(400 << 10)
    keys = {"infer.kv_memory": "auto", "infer.max_reqs": 2, "infer.step_tokens": 64, "infer.max_seq_len": "auto"}
    controller, ready = build_controller(make_config("Llama", {"max_position_embeddings": 3_000}, **keys))
    length = ready.info.max_model_len
    assert 64 < length < 3_000 and "a warm-up left" in ready.info.config["infer.max_seq_len"].reason
    played = play(controller, [NewRequest(id="a", prompt=[7] * (length - 8), max_tokens=8)])
    assert played.reasons() == {"a": "length"}


def test_a_warm_up_that_leaves_too_little_for_one_request_ends_the_start_with_what_to_change(
    make_config: Any, leaves: Any
) -> None:
    leaves(250 << 10)
    keys = {"infer.kv_memory": "auto", "infer.max_reqs": 2, "infer.step_tokens": 64, "infer.max_seq_len": 2_000}
    with pytest.raises(MemoryPlanError, match=r"a warm-up left 0\.2 MiB, .*lower it, infer\.step_tokens"):
        build_controller(make_config("Llama", {"max_position_embeddings": 3_000}, **keys))


def test_a_context_cut_by_the_memory_for_state_says_so_in_the_log_and_to_the_front_end(
    make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"infer.max_seq_len": "auto", "infer.kv_memory": 2**20, "infer.max_reqs": 1}
    with caplog.at_level("WARNING", "evener.worker"):
        _, ready = build_controller(make_config("Llama", {"max_position_embeddings": 8_000}, **keys))
    assert ready.info.max_model_len < 8_000
    reason = "the memory for state holds no more; a larger infer.kv_memory allows up to 8000"
    assert ready.info.config["infer.max_seq_len"].reason == reason
    assert f"a request has at most {ready.info.max_model_len} tokens: {reason}" in caplog.text
    frontend, _ = FrontendSettings().build(ready.info, lambda message: None)
    assert frontend.context.endswith(f"({reason})")


@pytest.mark.parametrize(("asked", "level"), [(500 << 30, "WARNING"), (1 << 30, "INFO")])
def test_a_kv_memory_that_no_request_can_use_is_named_with_what_state_gets(
    asked: int, level: str, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "evener.worker"):
        _, ready = build_controller(make_config(**{"infer.kv_memory": asked}))
    (record,) = [each for each in caplog.records if "infer.kv_memory is" in each.getMessage()]
    assert record.levelname == level
    size = f"{asked >> 30}.00 GiB, but state gets {ready.info.memory.state / 2**20:.1f} MiB: "
    assert size in record.getMessage() and "(infer.max_reqs)" in record.getMessage()


def test_random_weights_without_a_package_that_makes_them_are_refused_with_one(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.engine.worker.weights.installed_catalog", Catalog)
    with pytest.raises(CheckpointError, match=r"load=dummy .* pip install evener-inspection"):
        build_controller(make_config("Llama"))


def test_a_model_cache_without_a_package_that_keeps_one_is_refused_with_one(
    make_lively: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.engine.worker.weights.installed_catalog", Catalog)
    with pytest.raises(CheckpointError, match=r"model_cache= needs .* pip install evener-formats"):
        build_controller(make_lively("Llama", model_cache="/cache"))
