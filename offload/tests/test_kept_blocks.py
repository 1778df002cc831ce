"""Host memory for blocks on a device with streams and memory of its own: the tokens of the CPU, which keeps all."""

from __future__ import annotations

import pytest
from expert_families import FEW_BLOCKS, Configured, worker_of
from harsh_traffic import GREEDY, shrink

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_kv.host_memory import HostMemory

HOST = {"infer.kv_host_memory": "64MiB"}


def talk(controller: Controller) -> list[list[int]]:
    """Three chats of three turns at the same time; each begins with more than a block of 128 tokens, and two of them
    do not fit the few blocks that there are."""
    ids = [5 + 7 * i * i % 89 for i in range(200)]
    said = [ids[:150], ids[20:160], ids[50:185]]
    for turn in range(3):
        messages = [NewRequest(id=f"{turn}.{n}", prompt=list(each), max_tokens=8, sampling=GREEDY)
                    for n, each in enumerate(said)]  # fmt: skip
        played = play(controller, messages)
        assert set(played.reasons().values()) == {"length"}
        for message, each in zip(messages, said, strict=True):
            each += [*played.tokens[message.id], 3 + turn]
    return said


def on_the_cpu(configured: Configured, family: str) -> list[list[int]]:
    return talk(build_controller(configured(family, backend="cpu", **{"infer.block_size": 128}))[0])


@pytest.mark.parametrize(
    "family", ["GptOss", *(pytest.param(f, marks=pytest.mark.slow) for f in ("Qwen3Moe", "DeepseekV3"))]
)
def test_later_turns_of_chats_get_their_state_from_the_host(configured: Configured, family: str) -> None:
    controller, _ = build_controller(configured(family, **HOST))
    shrink(controller, FEW_BLOCKS[family])
    mover = worker_of(controller).mover
    assert isinstance(mover, HostMemory) and len(mover._streams) == 2
    assert talk(controller) == on_the_cpu(configured, family)
    counters = controller.scheduler.stats.counters
    assert counters["kv_host_hits"] >= 3 and counters["kv_host_loaded_bytes"] > 0
    assert controller.scheduler.state.pool.used == 0


@pytest.mark.slow
def test_two_ranks_keep_their_parts(configured: Configured) -> None:
    with rank_threads(configured(**HOST, **{"infer.tp_size": 2})) as (controller, ranks):
        shrink(controller, FEW_BLOCKS["Qwen3Moe"])
        assert talk(controller) == on_the_cpu(configured, "Qwen3Moe")
        assert controller.scheduler.stats.counters["kv_host_hits"] >= 3
        whole = sum(worker.mover.slab_bytes for worker in ranks.workers if isinstance(worker.mover, HostMemory))
    mover = worker_of(build_controller(configured(**HOST))[0]).mover
    assert isinstance(mover, HostMemory) and mover.slab_bytes == whole


@pytest.mark.slow
def test_experts_on_the_host_go_together_with_it(configured: Configured) -> None:
    controller, _ = build_controller(configured(**HOST, **{"infer.resident_experts": 24}))
    shrink(controller, FEW_BLOCKS["Qwen3Moe"])
    assert talk(controller) == on_the_cpu(configured, "Qwen3Moe")
    counters = controller.scheduler.stats.counters
    assert counters["expert_hits"] and counters["kv_host_hits"] >= 3
