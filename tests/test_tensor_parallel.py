"""Ranks that share every layer, through the real engine on the CPU backend: tokens are those of one rank, in chunks, in
company, after a prefix hit, and with noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.backend_search import BackendSearch
from evener.config import from_overrides
from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.facts.manifest_report import ManifestReport
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.worker import Worker
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import RunResult, play
from evener_inspection.explanation import explain

SMALL = {"backend": "cpu", "load": "dummy", "dtype": "float32", "infer.max_seq_len": 160, "infer.max_reqs": 4,
         "infer.step_tokens": 24, "infer.threads": 1, "infer.kv_memory": 2**24, "infer.block_size": 16,
         "infer.snapshot_every": 32}  # fmt: skip
GREEDY = Sampling(temperature=0.0)
SIZES: Mapping[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 32, "intermediate_size": 100},
    "Qwen2": {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 16},
    "Qwen3Moe": {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16},
    "DeepseekV3": {"num_attention_heads": 12, "num_key_value_heads": 12},
    "Mpt": {"n_heads": 12, "d_model": 192},
    "Gemma3": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "Qwen3Next": {"num_attention_heads": 4, "num_key_value_heads": 1, "linear_num_key_heads": 4,
                  "linear_num_value_heads": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread a rank."""


def configured(folder: Path, family: str, **more: Any) -> Config:
    folder.mkdir(exist_ok=True)
    shape = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family]}
    shape["initializer_range"] = 1.0
    (folder / "config.json").write_text(json.dumps(shape))
    return from_overrides(str(folder), {**SMALL, **more})


def answers(controller: Controller, vocab: int) -> RunResult:
    """A long prompt in chunks, two short ones beside it, the long one again, and two with noise."""
    noise = torch.Generator().manual_seed(5)
    ids = torch.randint(3, vocab, (60,), generator=noise).tolist()
    random = Sampling(temperature=0.9, top_p=0.9, seed=11)
    asked = {"long": (ids, 24, GREEDY), "short": (ids[7:12], 9, GREEDY), "one": (ids[:1], 20, GREEDY),
             "again": (ids, 24, GREEDY), "random": (ids[:9], 30, random), "penalized":
             (ids[:30], 20, Sampling(temperature=0.0, repetition_penalty=1.3, logprobs=3))}  # fmt: skip
    messages = [NewRequest(id=k, prompt=p, max_tokens=n, sampling=s) for k, (p, n, s) in asked.items()]
    return play(controller, messages, arrivals={"again": 40, "random": 5})


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("Qwen3Moe", 3),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("Qwen2", 4), ("Llama", 2), ("Llama", 3), ("Llama", 4), ("Qwen3Moe", 2), ("DeepseekV3", 2),
                    ("DeepseekV3", 4), ("Qwen3Next", 2), ("Gemma3", 2), ("Mpt", 3)))],
)  # fmt: skip
def test_ranks_give_the_tokens_of_one(family: str, ranks: int, tmp_path: Path) -> None:
    vocab = find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"]
    one = answers(build_controller(configured(tmp_path, family))[0], vocab)
    with rank_threads(configured(tmp_path, family, **{"infer.tp_size": ranks})) as (controller, _):
        more = answers(controller, vocab)
    assert more.tokens == one.tokens and more.reasons() == one.reasons()
    assert more.cached == one.cached and more.cached["again"] > 0
    assert len({token for tokens in one.tokens.values() for token in tokens}) > 10, "too dull to show a difference"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks"),
    [("Llama", 3), ("DeepseekV3", 2),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (("Llama", 4), ("Qwen2", 2), ("Qwen3Moe", 2)))],
)  # fmt: skip
def test_ranks_in_processes_give_the_tokens_of_one(family: str, ranks: int, tmp_path: Path) -> None:
    vocab = find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"]
    one = answers(build_controller(configured(tmp_path, family))[0], vocab)
    controller, _ = build_controller(configured(tmp_path, family, **{"infer.tp_size": ranks}))
    try:
        more = answers(controller, vocab)
    finally:
        controller.executor.close()
    assert more.tokens == one.tokens and more.cached == one.cached


def test_the_kernels_of_one_rank_serve_between_the_sums(tmp_path: Path) -> None:
    with rank_threads(configured(tmp_path, "Llama", **{"infer.tp_size": 2})) as (_, executor):
        rows = ManifestReport.of(executor.workers[0].assembly.resolver.manifest).ops
    served = {row.op: row.provider for row in rows if row.provider.startswith("cpu/")}
    assert {"attention_block", "mlp_block"} <= set(served)
    [reason] = {each.reason for row in rows if row.op == "decoder_layer" for each in row.refused}
    assert reason == "is written for one rank; it may serve what is between the sums over ranks"


def test_a_ranks_state_and_weights_are_its_share(tmp_path: Path) -> None:
    config = configured(tmp_path, "Llama", **{"infer.kv_memory": 12 * 147_456})
    shared = configured(tmp_path, "Llama", **{"infer.kv_memory": 12 * 147_456, "infer.tp_size": 4})
    one = Worker(config, BackendSearch("cpu"))
    with rank_threads(shared) as (_, executor):
        ranks = executor.workers
    assert {w.assembly.geometry.block_bytes * 4 for w in ranks} == {one.assembly.geometry.block_bytes}
    assert len({w.facts.slabs for w in ranks}) == 1 and ranks[0].facts.slabs > 3 * one.facts.slabs
    explained = explain(shared)
    assert explained["memory"]["weights"] == ranks[0].facts.info.memory.weights
    for worker in ranks:
        memory = worker.facts.info.memory
        assert memory.measured_weights == memory.weights - memory.mapped
        assert memory.weights < 0.4 * one.facts.info.memory.weights
