"""The simulated device with the user's commands, compared with the CPU backend. Level L3: not a real chip's numbers."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import make_transformers
from served import Served, tiny_model
from source_tree import ROOT

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import find_architecture
from evener_conformance.reference.engine import RunResult, play, small_config
from evener_conformance.simulated import DEVICES, descriptor, install_simulated_backend
from evener_conformance.simulated.constraints import Constraints
from evener_conformance.simulated.device import SimulatedDevice
from evener_inspection.rank_threads import RankThreads

LIMITS = {"infer.max_seq_len": 256, "infer.kv_memory": 2**24}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}


@pytest.fixture(autouse=True)
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    """Install the simulated backend for this process and its children."""
    folder = tmp_path / "installed"
    install_simulated_backend(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return folder


def answers(folder: Path, **options: Any) -> RunResult:
    config = small_config(folder, "Llama", HEADS, **{**LIMITS, **options})
    controller, _ = build_controller(config)
    try:
        return play(controller, **traffic())
    finally:
        controller.executor.close()


def traffic() -> dict[str, Any]:
    """Requests that need chunks, batching and a prefix hit, greedy and sampled."""
    ids = [5 + 7 * i % 190 for i in range(150)]
    warm = Sampling(temperature=0.8, seed=3)
    asked = {"long": (ids, Sampling(temperature=0.0)), "short": (ids[3:9], Sampling(temperature=0.0)), "warm":
             (ids[:40], warm), "again": (ids, Sampling(temperature=0.0))}  # fmt: skip
    messages = [NewRequest(id=k, prompt=prompt, max_tokens=12, sampling=s) for k, (prompt, s) in asked.items()]
    return {"messages": messages, "arrivals": {"again": 40}}


def test_its_tokens_are_those_of_the_cpu_backend(tmp_path: Path) -> None:
    want = answers(tmp_path / "a", backend="cpu", **{"infer.block_size": 128})
    got = answers(tmp_path / "b", backend="simulated")
    assert not got.dead and got.tokens == want.tokens and got.cached == want.cached
    assert got.cached["again"] == 128


def test_a_model_cache_brings_the_weights_to_the_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks that it has no kernels for, and so holds dequantized."""
    shape = {**find_architecture("LlamaForCausalLM").tiny_config(), **HEADS}
    make_transformers(shape, tmp_path / "model")
    keys = {"backend": "simulated", "dtype": "float32", "quant": "q8_0", "infer.max_reqs": 4, **LIMITS}
    caplog.set_level("INFO", "evener.model_cache")
    found = []
    for more in ({}, {"model_cache": str(tmp_path / "cache")}, {"model_cache": str(tmp_path / "cache")}):
        controller, ready = build_controller(from_overrides(str(tmp_path / "model"), {**keys, **more}))
        found.append((play(controller, **traffic()).tokens, ready.info.memory.measured_weights))
        controller.executor.close()
    assert found[0] == found[1] == found[2]
    said = [each.getMessage() for each in caplog.records if each.name == "evener.model_cache"]
    assert "there is none yet" in said[0] and "wrote" in said[1] and "weights from" in said[2]


def test_the_page_lists_every_switch() -> None:
    page = (ROOT / "docs" / "simulated-devices.md").read_text("utf-8")
    assert re.findall(r"^\| `simulated\.(\w+)` \|", page, re.MULTILINE) == list(descriptor.options)


def test_two_ranks_in_one_process_have_a_chip_each_and_give_the_tokens_of_one(tmp_path: Path) -> None:
    one = answers(tmp_path / "a", backend="simulated")
    gc.collect()
    chips = torch.get_device_module("simulated")
    before = [chips.memory_allocated(index) for index in range(DEVICES)]
    shape = {"backend": "simulated", "executor": "inline", "infer.tp_size": 2, **LIMITS}
    controller, _ = build_controller(small_config(tmp_path / "b", "Llama", HEADS, **shape))
    executor = controller.executor
    assert isinstance(executor, RankThreads)
    try:
        taken = [chips.memory_allocated(index) - was for index, was in enumerate(before)]
        for rank, worker in enumerate(executor.workers):
            plan = worker.facts.info.memory
            assert worker.assembly.device.index == rank and f"simulated chip {rank}" in worker.facts.info.device
            assert taken[rank] >= plan.measured_weights + plan.state > plan.state > 0
        assert taken[2:] == [0, 0]
        two = play(controller, **traffic())
    finally:
        executor.close()
    assert not two.dead and two.tokens == one.tokens and two.reasons() == one.reasons()


def test_a_rank_that_reads_the_memory_of_anothers_chip_is_an_error() -> None:
    SimulatedDevice(0, Constraints.all_on())
    here, there = (torch.ones(2, 2, device=f"simulated:{index}") for index in (0, 1))
    assert (here @ there.to("simulated:0")).device.index == 0 and (there @ there).device.index == 1
    with pytest.raises(RuntimeError, match="aten::mm was given tensors of simulated:0 and simulated:1; a chip"):
        here @ there


@pytest.mark.slow
def test_two_ranks_over_gloo_give_the_tokens_of_one(tmp_path: Path) -> None:
    one = answers(tmp_path / "a", backend="simulated")
    two = answers(tmp_path / "b", backend="simulated", **{"infer.tp_size": 2})
    assert not two.dead and two.tokens == one.tokens and two.reasons() == one.reasons()


@pytest.mark.slow
def test_evener_serve_answers_from_the_backend_that_was_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    settings = ("--backend", "simulated", "load=dummy", "infer.max_seq_len=512", "infer.kv_memory=16777216")
    with Served.model(folder, *settings) as served:
        prompt = {"model": served.name, "prompt": "hello", "max_tokens": 8, "temperature": 0}
        first, again = (served.http.post("/v1/completions", json=prompt).json() for _ in range(2))
        assert first["usage"]["completion_tokens"] == 8 and first["choices"][0]["text"] == again["choices"][0]["text"]
        assert served.get("/version").json()["backend"] == "simulated"
        assert served.stop() == 0
