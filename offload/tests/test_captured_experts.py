"""Experts on the host in captured steps of the simulated chip: the tokens of one device that holds them."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_families import FAMILIES, FEW_BLOCKS, HEADS, Configured, on_the_cpu, refuse_in_replays, worker_of
from harsh_traffic import LIMITS, assert_same, assert_some, shrink, some, traffic

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import LogitBias, NewRequest, Ready, Sampling
from evener.errors import PluginError
from evener_backend_cpu import experts
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play, small_config
from evener_conformance.simulated.device import SimulatedDevice
from evener_offload.captured_experts import Exchanges, HostCall
from evener_offload.host_experts import HostExperts


def placed(controller: Controller) -> HostExperts:
    place = worker_of(controller).assembly.placement
    assert isinstance(place, HostExperts)
    return place


def chip(controller: Controller) -> SimulatedDevice:
    device = worker_of(controller).assembly.device
    assert isinstance(device, SimulatedDevice)
    return device


def host(family: str = "Qwen3Moe") -> dict[str, Any]:
    return {"infer.cpu_layer_num": FAMILIES[family][1]}


@pytest.mark.parametrize("family", [pytest.param("Qwen3Moe", marks=pytest.mark.slow), "GptOss"])
def test_captured_steps_with_experts_on_the_host_give_the_tokens_of_one_device(
    configured: Configured, family: str
) -> None:
    """With chunks, preemption, prefix hits and aborts together."""
    want = on_the_cpu(family)
    controller, ready = build_controller(configured(family, **host(family)))
    shrink(controller, FEW_BLOCKS[family])
    got = play(controller, **traffic())
    assert_same(got, want)
    stats = controller.scheduler.stats
    assert stats.preemptions and got.cached["once more"] == 128
    assert 10 < stats.counters["host_expert_captured_steps"] < stats.steps
    assert sum(replay.runs for replay in chip(controller).capture.replays) >= 20
    assert "decode steps of up to" in (note := "\n".join(ready.info.manifest.notes)) and "prompts" not in note


def test_shared_experts_are_computed_while_the_host_computes_the_others(tmp_path: Path) -> None:
    """On another stream: the host is called before they are launched, and its result is waited for after."""
    shape = {**HEADS, "hidden_size": 64, "num_experts": 32, "moe_intermediate_size": 64,
             "shared_expert_intermediate_size": 64}  # fmt: skip

    def engine(name: str, **keys: Any) -> tuple[Controller, Ready]:
        return build_controller(small_config(tmp_path / name, "Qwen2Moe", shape, **LIMITS, **keys))

    want = play(engine("cpu", backend="cpu", **{"infer.block_size": 128})[0], **traffic())
    controller, _ = engine("chip", backend="simulated", **{"infer.cpu_layer_num": 2})
    assert_same(play(controller, **traffic()), want)
    assert controller.scheduler.stats.counters["host_expert_captured_steps"] > 10


def test_the_same_samples_come_with_penalties_and_biases_captured_or_not(configured: Configured) -> None:
    ids = [5 + 7 * i * i % 89 for i in range(40)]
    kinds = [Sampling(temperature=0.9, seed=1), Sampling(temperature=0.7, seed=5, repetition_penalty=1.3),
             Sampling(temperature=0.0), Sampling(temperature=0.8, seed=2, bias=[LogitBias(7, 3.0)])]  # fmt: skip
    asked = [NewRequest(id=str(n), prompt=ids[n : 20 + 3 * n], max_tokens=9, sampling=kind)
             for n, kind in enumerate(kinds)]  # fmt: skip
    captured, eager = (play(build_controller(configured(**host(), **{"infer.use_cuda_graph": on}))[0], asked)
                       for on in (True, False))  # fmt: skip
    assert not captured.dead and captured.tokens == eager.tokens


def test_a_device_that_copies_and_calls_at_once_is_asked_to(configured: Configured) -> None:
    controller, _ = build_controller(configured(**host()))
    device, layers = chip(controller), list[int]()

    class Asked:
        def exchange(self, inputs: Any, to: Any, work: Any, found: Any, result: Any) -> None:
            layers.append(len(inputs))
            for source, target in zip(inputs, to, strict=True):
                target.copy_(source, non_blocking=True)
            device.host_call(work)
            result.copy_(found, non_blocking=True)

    assert isinstance(Asked(), Exchanges) and not isinstance(device, Exchanges)
    placed(controller)._captured._exchanges = Asked()
    shrink(controller, FEW_BLOCKS["Qwen3Moe"])
    assert_same(play(controller, **traffic()), on_the_cpu())
    assert set(layers) == {3} and controller.scheduler.stats.counters["host_expert_captured_steps"] > 10


LIBC = ctypes.CDLL(None)


class Asking:
    """A device that unlocks words, and whose calls of a step are answered together."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self.states = device, list[int]()

    def exchange(self, inputs: Any, to: Any, work: HostCall, found: Any, result: Any) -> None:
        for source, target in zip(inputs, to, strict=True):
            target.copy_(source, non_blocking=True)
        ready, done = ctypes.c_int(), ctypes.c_int()
        LIBC.pthread_spin_init(ctypes.byref(ready), 0)
        LIBC.pthread_spin_lock(ctypes.byref(ready))
        answer = work.answers([(work, ctypes.addressof(ready), ctypes.addressof(done))])
        assert answer is not None

        def ask() -> None:
            state = (ctypes.c_int64 * 2)()
            thread = threading.Thread(target=answer, args=(ctypes.addressof(state),))
            thread.start()
            LIBC.pthread_spin_unlock(ctypes.byref(ready))
            thread.join(60)
            assert done.value == 1
            self.states.append(state[0])

        self._device.host_call(ask)
        self.kept = [*getattr(self, "kept", []), ask]
        result.copy_(found, non_blocking=True)


def test_the_host_s_kernels_answer_a_device_by_themselves(configured: Configured) -> None:
    controller, _ = build_controller(configured(**host()))
    asking = placed(controller)._captured._exchanges = Asking(chip(controller))
    assert_some(play(controller, **some()), on_the_cpu())
    counters = controller.scheduler.stats.counters
    assert counters["host_expert_captured_steps"] > 10 and counters["host_expert_read_bytes"] > 0
    assert len(asking.states) > 30 and not any(asking.states) and not placed(controller)._captured._progress.submitted


def test_a_kernel_that_fails_while_it_answers_is_named(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, _ = build_controller(configured(**host()))
    placed(controller)._captured._exchanges = Asking(chip(controller))
    bind = experts._Stacks.bind

    def refused(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("a wrong tensor")
        return bind(*arguments)

    monkeypatch.setattr(experts._Stacks, "bind", refused)
    with pytest.raises(PluginError, match=r"kernel cpu/\S+ .* raised ValueError: a wrong tensor"):
        play(controller, traffic()["messages"][:2])


def test_padding_rows_cost_the_host_nothing(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of three requests is padded to four rows; the host computes three."""
    controller, _ = build_controller(configured(**host()))
    place, rows = placed(controller), list[int]()
    call = place._captured._call

    def watched(begins: bool, compute: Any, *more: Any) -> None:
        def counted(count: int) -> None:
            rows.append(count)
            compute(count)

        call(begins, counted, *more)

    monkeypatch.setattr(place._captured, "_call", watched)
    asked = [NewRequest(id=str(n), prompt=[5, 6, 7 + n], max_tokens=12, sampling=Sampling(temperature=0.0))
             for n in range(3)]  # fmt: skip
    assert not play(controller, asked).dead
    steps = place.counters()["host_expert_captured_steps"]
    assert steps >= 9 and rows.count(3) >= 3 * (steps - 2) and not place._captured._progress.submitted


def test_rows_of_a_replay_belong_to_it_though_the_next_one_is_submitted_before_it_runs(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = build_controller(configured(**host()))
    captured, seen = placed(controller)._captured, list[int | None]()
    captured.replayed(3)
    captured.replayed(1)
    for begins in (True, False, True, False, True):
        captured._call(begins, seen.append, 0, np.zeros((4, 2), np.int32), np.ones(8, np.int32))
    assert seen == [3, 3, 1, 1, 4], "a step without a number has no padding"


def test_a_kernel_of_the_host_that_fails_in_a_replay_is_named(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = build_controller(configured(**host()))
    refuse_in_replays(monkeypatch)
    with pytest.raises(PluginError, match=r"kernel cpu/\S+ .* raised ValueError: a wrong tensor"):
        play(controller, traffic()["messages"][:2])
    with pytest.raises(PluginError, match="a wrong tensor"):
        placed(controller).replayed(1)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"simulated.host_calls": False}, r"memory, and .* does not call the host \(DeviceCapabilities.host_calls\)"),
        pytest.param({"offload.halves": "on"}, "memory, and offload.halves=on", marks=pytest.mark.slow),
    ],
)
def test_steps_that_cannot_be_captured_run_eagerly_and_the_manifest_says_why(
    configured: Configured, keys: dict[str, Any], why: str
) -> None:
    controller, ready = build_controller(configured(**{"infer.cpu_layer_num": 3, **keys}))
    assert_same(play(controller, **traffic()), on_the_cpu())
    notes = "\n".join(ready.info.manifest.notes)
    assert re.search("steps run eagerly: experts of 3 layers are in host " + why, notes), notes
    assert not controller.scheduler.stats.counters["host_expert_captured_steps"]


def test_steps_of_several_ranks_run_eagerly(configured: Configured) -> None:
    with rank_threads(configured(**{"infer.tp_size": 2, "infer.cpu_layer_num": 2})) as (_, ranks):
        notes = "\n".join(ranks.workers[0].assembly.resolver.manifest.notes)
        assert "layers are in host memory, and of several ranks one could not end the others' step" in notes
