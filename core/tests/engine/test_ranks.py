"""Workers of several ranks on one machine, over gloo: they start together, errors name a rank, and all of them end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from evener.config.resolve import ResolvedValue
from evener.engine.facts.engine_info import EngineInfo
from evener.engine.facts.worker_facts import WorkerFacts, merge_facts
from evener.engine.processes.local_clients import InlineClient
from evener.engine.processes.process_executor import ProcessExecutor
from evener.engine.processes.start import build_controller, start_engine
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ArchitectureError, EngineDeadError, EngineError
from evener_conformance.fake_engine import NO_MEMORY
from evener_conformance.reference.engine import RunResult
from evener_inspection.rank_threads import RankThreads

#: Seconds for whatever must happen some time; a machine with other work is slow.
PATIENCE = 120.0


def requests(max_tokens: int = 10) -> list[NewRequest]:
    warm = Sampling(temperature=0.9, top_k=30, seed=4)
    return [
        NewRequest(id=f"r{i}", prompt=list(range(1 + i, 20 + 9 * i)), max_tokens=max_tokens, sampling=s)
        for i, s in enumerate((Sampling(temperature=0.0), warm, warm))
    ]


def test_two_ranks_match_one_and_the_death_of_either_is_reported_by_name(
    make_config: Any, drive: Any, warm_children: None
) -> None:
    alone = start_engine(make_config(), "inline")
    expected = drive(alone, requests())
    alone.close()
    controller, ready = build_controller(make_config(**{"infer.tp_size": 2}))
    executor = controller.executor
    assert isinstance(executor, ProcessExecutor) and len(executor.children) == 2
    assert len(ready.info.ranks) == 2
    client = InlineClient(controller, ready)
    try:
        assert drive(client, requests()).tokens == expected.tokens
        for message in requests(90):
            client.send(message)
        after = type(expected)()
        while not after.tokens:
            after.see(client.receive(PATIENCE))
        os.kill(executor.children[1].process.pid, signal.SIGKILL)
        while not after.dead:
            after.see(client.receive(PATIENCE))
        (reason,) = after.dead
        assert "rank 1 (part 1 of 2)" in reason and "SIGKILL" in reason, "the failed rank is named, not rank 0"
        assert after.reasons() == dict.fromkeys(("r0", "r1", "r2"), "error")
    finally:
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_times_out_and_all_processes_exit(rank: int, make_config: Any) -> None:
    # A rank of a busy machine is silent for seconds by itself, while it imports torch.
    controller, ready = build_controller(make_config(**{"infer.pp_size": 2, "infer.heartbeat_timeout": 6.0}))
    executor = controller.executor
    assert isinstance(executor, ProcessExecutor)
    client, played = InlineClient(controller, ready), RunResult()
    try:
        for message in requests(90):
            client.send(message)
        while not played.tokens:
            played.see(client.receive(PATIENCE))
            assert not played.dead, played.dead
        os.kill(executor.children[rank].process.pid, signal.SIGSTOP)
        while not played.dead:
            played.see(client.receive(PATIENCE))
        assert f"rank {rank} (stage {rank} of 2) process sent no heartbeat" in played.dead[0]
        assert played.reasons() == dict.fromkeys(("r0", "r1", "r2"), "error")
    finally:
        client.close()
    assert executor.children[rank].process.returncode == -signal.SIGKILL


def test_a_hanging_step_times_out(make_config: Any, warm_children: None) -> None:
    controller, _ = build_controller(make_config(executor="process", **{"infer.step_timeout": 1.0}))
    executor = controller.executor
    assert isinstance(executor, ProcessExecutor)
    try:
        with pytest.raises(EngineDeadError, match=r"a step has taken more than infer.step_timeout=1 s"):
            executor.read()  # of a step that nobody was given
    finally:
        executor.close()


def test_a_start_up_error_names_its_rank(make_config: Any, warm_children: None) -> None:
    wrong = make_config("Llama", {"architectures": ["LamaForCausalLM"]}, **{"infer.tp_size": 2})
    with pytest.raises(ArchitectureError, match=r"worker of rank \d \(part \d of 2\): .*LamaForCausalLM"):
        ProcessExecutor(wrong)


def test_ranks_of_one_process_share_the_device_of_a_backend_that_has_one(make_config: Any) -> None:
    controller, ready = build_controller(make_config(executor="inline", **{"infer.tp_size": 2}))
    executor = controller.executor
    assert isinstance(executor, RankThreads)
    try:
        assert [worker.assembly.device.index for worker in executor.workers] == [0, 0]
        assert [worker.assembly.ranks.local_size for worker in executor.workers] == [2, 2]
        assert ready.info.config["executor"] == ResolvedValue("inline", "as asked")
    finally:
        controller.executor.close()


def test_merged_facts_are_the_minimum_and_different_state_is_an_error() -> None:
    def facts(slabs: int, length: int, cut: int = 1) -> WorkerFacts:
        info = EngineInfo(
            model="",
            served_name="",
            max_model_len=length,
            vocab_size=9,
            device="d",
            backend="b",
            backend_reason="",
            memory=NO_MEMORY,
        )
        return WorkerFacts([], [cut], slabs, 16, 4, length, 24, info)

    both = merge_facts([facts(10, 90), facts(12, 80)])
    assert (both.slabs, both.max_seq_len, both.info.max_model_len) == (10, 80, 80)
    with pytest.raises(EngineError, match=r"cuts is \[1\] on rank 0 and \[2\] on rank 1"):
        merge_facts([facts(10, 90), facts(10, 90, 2)])
