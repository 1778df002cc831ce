"""Keys and values in eight bits: the engine gives the tokens of the naive engine, in mixed batches, with prefix hits,
under preemption, with forks and at any depth; memory halves; what a provider cannot store is refused with a reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.config.schema import InferConfig
from evener.contracts.quantized.state import StateRequest, unscaled
from evener.engine.processes.start import build_controller
from evener.engine.quantized import state as quantized
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener.loading.checkpoint import open_checkpoint
from evener.ops.reference.state import PlainPages, ReferenceState
from evener_conformance.naive.model import NaiveModel
from evener_conformance.reference.device import HostDevice
from evener_formats.kv_cache.choice import choose_state

GREEDY = Sampling(temperature=0.0)


def requests() -> list[NewRequest]:
    noise = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 150, (length,), generator=noise).tolist() for length in (40, 7, 33, 1, 50, 18)]
    prompts.append(prompts[0] + [5, 6, 7])
    found = [NewRequest(id=f"r{i}", prompt=p, max_tokens=12, sampling=GREEDY) for i, p in enumerate(prompts)]
    return [*found, NewRequest(id="r7", prompt=prompts[4], max_tokens=12, sampling=GREEDY, fork_of="r4")]


def write_scales(path: Path, layers: int, heads: int, dtype: str = "float8_e4m3fn") -> Path:
    """Scales that differ by layer, by head, and between keys and values."""
    largest = {"float8_e4m3fn": 448, "int8": 127}[dtype]
    keys = {str(n): [(3 + n + head / 2) / largest for head in range(heads)] for n in range(layers)}
    values = {str(n): (1.5 + n / 4) / largest for n in range(layers)}
    cache = {"dtype": dtype, "key_scaling_factor": {"0": keys}, "value_scaling_factor": {"0": values}}
    path.write_text(json.dumps({"model_type": "any", "kv_cache": cache}))
    return path


def naive(config: Any) -> NaiveModel:
    """The naive engine, with state as the run stores it."""
    alone, infer = NaiveModel(config.model, max_positions=128), config.infer
    checkpoint = open_checkpoint(config.model)
    choose_state(StateRequest(
        infer.kv_dtype, infer.kv_scales, [alone.build.slots], checkpoint, checkpoint.headers, HostDevice(0), []
    ))  # fmt: skip
    assert all(slot.scales and slot.spec.tensors[0].wide == "float32" for slot in alone.build.slots)
    alone.reset()
    return alone


@pytest.mark.parametrize(
    ("family", "stored", "options"),
    [
        pytest.param("Llama", "fp8_e4m3", {}, marks=pytest.mark.slow),
        pytest.param("Llama", "int8", {"infer.step_tokens": 9, "infer.depth": 3}, marks=pytest.mark.slow),
        ("Gemma3", "int8", {"infer.step_tokens": 7}),
    ],
)
def test_tokens_match_the_naive_engine(
    family: str, stored: str, options: dict[str, Any], make_lively: Any, play: Any, shrink_pool: Any, tmp_path: Path,
    one_thread: None,
) -> None:  # fmt: skip
    depth = {"num_hidden_layers": {"Llama": 3, "Gemma3": 4}[family]}  # through fewer the rounding changes no token
    plain = make_lively(family, depth, **options)
    shape = json.loads((Path(plain.model) / "config.json").read_text())
    heads, layers = shape["num_key_value_heads"], shape["num_hidden_layers"]
    file = str(write_scales(tmp_path / "scales.json", layers, heads))
    config = make_lively(family, depth, **options, **{"infer.kv_dtype": stored, "infer.kv_scales": file})
    alone, messages = naive(config), requests()
    expected = {m.id: alone.greedy(m.prompt, m.max_tokens) for m in messages}
    controller, _ = build_controller(config)
    whole = play(controller, messages, arrivals={"r6": 60})
    assert whole.tokens == expected
    assert whole.cached["r6"] == 32
    tight, _ = build_controller(config)
    shrink_pool(tight, controller.scheduler.state.slabs_for(62, controller.scheduler.step_tokens))
    assert play(tight, messages).tokens == expected
    assert tight.scheduler.stats.preemptions > 0 and tight.scheduler.state.pool.used == 0
    # The numbers that were stored are others than in float32, or this test shows nothing.
    exact = NaiveModel(plain.model, max_positions=128)
    assert any(exact.greedy(m.prompt, m.max_tokens) != expected[m.id] for m in messages)


def test_the_memory_plan_has_one_byte_an_element_and_the_manifest_says_why(
    make_lively: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plain, narrow = (
        build_controller(make_lively("Llama", **more))[1].info for more in ({}, {"infer.kv_dtype": "fp8_e4m3"})
    )
    assert plain.memory.block_bytes == 4 * narrow.memory.block_bytes
    notes = narrow.manifest.notes
    assert "keys and values are stored as fp8_e4m3: infer.kv_dtype=fp8_e4m3" in notes
    assert any("with scales of 1, because none were found" in record.message for record in caplog.records)


def test_a_dtype_without_a_package_that_knows_it_is_an_error(monkeypatch: pytest.MonkeyPatch, make_lively: Any) -> None:
    class Nothing:
        def lazy_imports(self, kind: str) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(quantized, "installed_catalog", Nothing)
    with pytest.raises(ConfigError, match=r"infer\.kv_dtype=int8 needs a package .* pip install evener-formats"):
        build_controller(make_lively("Llama", **{"infer.kv_dtype": "int8"}))
    assert InferConfig().kv_dtype == "auto"


def test_a_provider_that_does_not_store_an_element_type_says_so() -> None:
    from evener_conformance.kit.shapes import Shape

    spec = Shape(2, 1, 16, 16, stored="int8").spec("float32")

    class Half(ReferenceState):
        scaled = frozenset({"float8_e4m3fn"})

    class Plain(PlainPages):
        supports, prepare = ReferenceState.supports, ReferenceState.prepare

    assert unscaled(Plain(), spec) == "does not store int8 with scales"
    assert unscaled(Half(), spec) == "does not store int8 with scales, only float8_e4m3fn"
    assert unscaled(ReferenceState(), spec) is None and unscaled(Plain(), Shape(2, 1, 16, 16).spec("float32")) is None
