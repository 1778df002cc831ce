"""The memory plan against what a run then holds, on the CPU: bytes that providers count, and tensors as they live."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evener.backend_search import BackendSearch
from evener.config import from_overrides
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, SamplePlan, TableUpdate
from evener.engine.worker.worker import Worker
from evener_conformance.naive.model import find_architecture


class Meter(TorchDispatchMode):
    """Bytes of the storages that ops make while it is on, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (at := _address(leaf)) not in given and at not in self._alive:
                storage = leaf.untyped_storage()
                self._alive[at] = storage.nbytes()
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._gone, at)
        return out

    def _gone(self, address: int) -> None:
        self._now -= self._alive.pop(address, 0)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def step(worker: Worker, rows: int, tokens: int, temperature: float) -> Plan:
    """A step of ``tokens`` tokens over ``rows`` requests, each sampled, over the null block."""
    geometry = worker.assembly.geometry
    each, sampling = tokens // rows, Sampling(temperature=temperature, top_k=20)
    blocks = [[0] * -(-each // geometry.block_size)] * len(geometry.groups)
    everyone = list(range(rows))
    drawn = SamplePlan(random=everyone if temperature else [], filtered=bool(temperature))
    return Plan(
        id=-1, admissions=[Admission(slot, [0] * each, sampling) for slot in everyone],
        updates=[TableUpdate(slot, 0, blocks) for slot in everyone], slots=everyone, starts=[0] * rows,
        counts=[each] * rows, samples=everyone, sampling=drawn,
    )  # fmt: skip


def compare(model: Path, **keys: Any) -> None:
    """Each part as planned, and all of it within 5 %."""
    worker = Worker(from_overrides(model, {"backend": "cpu", **keys}), BackendSearch("cpu"))
    info: Any = worker.facts.info
    planned, config = info.memory, worker.assembly.config
    assert planned.measured_weights == pytest.approx(planned.weights, rel=0.05)
    assert planned.measured_mapped == planned.mapped
    assert worker.pool.nbytes == planned.state
    tables = worker.runner.tables
    rows = sum(table.nbytes for table in (tables.tokens, tables.floats, tables.ints, *tables.blocks))
    assert rows == pytest.approx(planned.tables, rel=0.05)
    peak, worker.runner.last_rows = 0, None  # a step that computes all rows is the largest
    for count, temperature in ((1, 0.0), (config.max_reqs, 0.0), (config.max_reqs, 1.0)):
        tokens = min(config.step_tokens, count * (config.max_seq_len - 1))
        with Meter() as meter:
            worker.execute(step(worker, count, tokens, temperature)).wait()
        peak = max(peak, meter.peak)
    groups = worker.assembly.geometry.groups
    scratch = max(
        *(g.provider.workspace(g.spec, g.attention, config.step_tokens, config.max_seq_len) for g in groups),
        worker.assembly.resolver.footprint.workspace,
    )
    workspace = peak + scratch
    measured = planned.measured_weights + worker.pool.nbytes + rows + workspace
    assert planned.total == pytest.approx(measured, rel=0.05), (planned, workspace)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model_takes_what_was_planned(smollm2_dir: Path, dtype: str) -> None:
    keys = {"infer.kv_memory": "64MiB", "infer.max_seq_len": 1024, "infer.max_reqs": 16, "infer.step_tokens": 256}
    compare(smollm2_dir, dtype=dtype, **keys)


@pytest.mark.slow
def test_a_long_context_takes_what_was_planned(smollm2_dir: Path) -> None:
    keys = {"infer.kv_memory": "256MiB", "infer.max_seq_len": 8192, "infer.max_reqs": 4, "infer.step_tokens": 256}
    compare(smollm2_dir, **keys)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tiny_model_with_random_weights_takes_what_was_planned(tmp_path: Path, dtype: str) -> None:
    shape = {**find_architecture("LlamaForCausalLM").tiny_config(), "hidden_size": 96, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096}))
    keys = {"infer.kv_memory": "64MiB", "infer.max_seq_len": 512, "infer.max_reqs": 8}
    compare(tmp_path, load="dummy", dtype=dtype, **keys)


@pytest.mark.parametrize("impl", ["auto", pytest.param("ref", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_tiny_model_with_experts_takes_what_was_planned(tmp_path: Path, dtype: str, impl: str) -> None:
    shape = {**find_architecture("Qwen2MoeForCausalLM").tiny_config(), "hidden_size": 96, "head_dim": 16}
    shape |= {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096}))
    keys = {"infer.kv_memory": "16MiB", "infer.max_seq_len": 512, "infer.max_reqs": 8, "infer.op_impl": impl}
    compare(tmp_path, load="dummy", dtype=dtype, **keys)
