"""Prompts that one backend has computed and another answers: state crosses in the canonical layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expert_families import Configured
from harsh_traffic import GREEDY
from served import free_port

from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest
from evener_conformance.reference.engine import play

IDS = [5 + 7 * i * i % 89 for i in range(200)]
PROMPTS = [IDS[:150], IDS[20:160], IDS[:140]]


@pytest.fixture
def pair(configured: Configured, tmp_path: Path) -> Iterator[Any]:
    """``pair(family, backend, other)``: what computes prompts, what answers, and the address of the first."""
    (tmp_path / "key").write_text("a key that both of them share")
    engines: list[Controller] = []

    def start(family: str, first: str, second: str, **more: Any) -> tuple[Controller, Controller, str]:
        ports = free_port(3), free_port(3)
        for backend, own, peer in ((first, *ports), (second, *ports[::-1])):
            keys = {"offload.kv_transfer": f"127.0.0.1:{own}", "offload.kv_peers": f"127.0.0.1:{peer}",
                    "offload.kv_key_file": str(tmp_path / "key"), "infer.block_size": 128, **more}  # fmt: skip
            engines.append(build_controller(configured(family, backend=backend, **keys))[0])
        return engines[0], engines[1], f"127.0.0.1:{ports[0]}"

    yield start
    for engine in engines:
        engine.close()


FAMILIES = ("Qwen3Moe", "DeepseekV3", "GptOss")
BACKENDS = (("simulated", "cpu"), ("cpu", "simulated"), ("simulated", "simulated"))


@pytest.mark.parametrize(
    ("family", "backends"),
    # Between unlike ones; the other direction and all pairs are slow.
    [(f, b) if i == j == 1 else pytest.param(f, b, marks=pytest.mark.slow)
     for i, f in enumerate(FAMILIES) for j, b in enumerate(BACKENDS)],
)  # fmt: skip
def test_an_answer_begun_on_one_backend_goes_on_on_another(family: str, backends: Any, pair: Any) -> None:
    first, second, address = pair(family, *backends)
    for number, prompt in enumerate(PROMPTS):
        asked = NewRequest(id=f"p{number}", prompt=prompt, max_tokens=1, sampling=GREEDY, transfer="hold")
        (token,) = play(first, [asked]).tokens[f"p{number}"]
        source = f"{address}/p{number}"
        played = play(second, [NewRequest(id="d", prompt=prompt, max_tokens=8, sampling=GREEDY, transfer=source)])
        # The first engine alone is the measure.
        alone = play(first, [NewRequest(id="a", prompt=prompt, max_tokens=8, sampling=GREEDY)])
        assert played.tokens["d"] == alone.tokens["a"] and played.tokens["d"][0] == token
        assert played.cached["d"] == 128
    counters = second.scheduler.connector.counters
    # The third prompt begins with the block of the first, so nothing of it is fetched.
    assert counters["kv_transfer_hits"] == 2 and counters["kv_transfer_failures"] == 0


@pytest.mark.slow
def test_chats_go_back_and_forth_between_servers_that_keep_state_in_host_memory(pair: Any) -> None:
    """Each turn's prompt is computed on the first and answered on the second. Each has the blocks of one chat, so state
    leaves all the time, and comes back from where it is."""
    first, second, address = pair("Qwen3Moe", "simulated", "simulated", **{"infer.kv_host_memory": "64MiB"})
    for engine in (first, second):
        pool = engine.scheduler.state.pool
        assert pool.allocate_all([(pool.free // pool.slab - 2, pool.slab)]) is not None
    chats, alone = [list(prompt) for prompt in PROMPTS[:2]], [list(prompt) for prompt in PROMPTS[:2]]
    judge = pair("Qwen3Moe", "cpu", "cpu")[0]
    for turn in range(2):
        names = [f"{turn}.{number}" for number in range(len(chats))]
        play(first, [NewRequest(id=name, prompt=list(chat), max_tokens=1, sampling=GREEDY, transfer="hold")
                     for name, chat in zip(names, chats, strict=True)])  # fmt: skip
        played = play(second, [NewRequest(id=name, prompt=list(chat), max_tokens=6, sampling=GREEDY,
                                          transfer=f"{address}/{name}")
                               for name, chat in zip(names, chats, strict=True)])  # fmt: skip
        want = play(judge, [NewRequest(id=name, prompt=list(chat), max_tokens=6, sampling=GREEDY)
                            for name, chat in zip(names, alone, strict=True)])  # fmt: skip
        assert not played.dead and played.tokens == want.tokens
        for name, *both in zip(names, chats, alone, strict=True):
            for chat in both:
                chat += [*played.tokens[name], 3 + turn]
    found = second.scheduler.connector.counters
    assert found["kv_host_hits"] > 0 and found["kv_transfer_hits"] > 0
    assert first.scheduler.connector.counters["kv_host_hits"] > 0
