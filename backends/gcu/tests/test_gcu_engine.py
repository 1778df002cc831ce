"""The engine on the simulated device with a GCU's switches, and stand-ins for the vendor's ops: no real chip."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from gcu_stand_ins import LAUNCHED, install_on_simulator, launches, stand_in_ops
from stand_ins import installed

from evener.cli.main import main
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.reference.engine import RunResult, play, small_config

#: Heads of 32, the shortest that the vendor's attention has.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "Gemma3": {"head_dim": 32},
    "Qwen3Moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "DeepseekV2": {},
}


def answers(folder: Path, family: str, **options: Any) -> RunResult:
    limits = {"infer.max_seq_len": 256, "infer.kv_memory": 2**24, "infer.block_size": 64}
    controller, _ = build_controller(small_config(folder, family, SHAPES[family], **{**limits, **options}))
    ids = [5 + 7 * i % 90 for i in range(70)]
    asked = {
        "long": (ids, Sampling(temperature=0.0)),
        "short": (ids[3:9], Sampling(temperature=0.0)),
        "warm": (ids[:40], Sampling(temperature=0.8, top_k=8, seed=3)),
        "again": (ids, Sampling(temperature=0.0)),
    }
    messages = [NewRequest(id=k, prompt=prompt, max_tokens=8, sampling=s) for k, (prompt, s) in asked.items()]
    try:
        return play(controller, messages, arrivals={"again": 30})
    finally:
        controller.executor.close()


@pytest.mark.parametrize("family", ["Llama", *(pytest.param(f, marks=pytest.mark.slow) for f in list(SHAPES)[1:])])
def test_tokens_are_the_cpus_L3(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    install_on_simulator(tmp_path / "site", monkeypatch)
    want = answers(tmp_path / "a", family, backend="cpu")
    with (
        caplog.at_level(logging.WARNING, "evener.gcu"),
        installed(tmp_path / "vendor", stand_in_ops(), functions=LAUNCHED),
    ):
        got = answers(tmp_path / "b", family, backend="gcu")
    assert not got.dead and got.tokens == want.tokens
    ran = launches()
    # Gemma multiplies by weight + 1, which the vendor's norm does not.
    assert ("_C::rms_norm" in ran) == (family != "Gemma3")
    assert ran["_C::silu_and_mul" if family != "Gemma3" else "_C::gelu_tanh_and_mul"]
    if family != "DeepseekV2":
        assert ran["_C_cache_ops::reshape_and_cache"] and ran["_C::paged_attention_v1"] and ran["_C::rotary_embedding"]
        assert got.cached["again"] == 64, "a block of 64 tokens was found again"
    assert caplog.text.count("can neither sort a vocabulary nor sum it up") == 1


def test_fp8_state_becomes_int8_which_the_log_says_and_gives_the_cpus_tokens_L3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    install_on_simulator(tmp_path / "site", monkeypatch)
    want = answers(tmp_path / "a", "Llama", backend="cpu", **{"infer.kv_dtype": "int8"})
    with (
        caplog.at_level(logging.WARNING),
        installed(tmp_path / "vendor", stand_in_ops(), functions=LAUNCHED),
    ):
        got = answers(tmp_path / "b", "Llama", backend="gcu", **{"infer.kv_dtype": "fp8_e4m3"})
    assert not got.dead and got.tokens == want.tokens
    assert launches()["_C_cache_ops::reshape_and_cache"] and launches()["_C::paged_attention_v1"]
    said = "the KV cache is stored as int8 instead of fp8_e4m3 (infer.kv_dtype=fp8_e4m3), which gcu.paged"
    assert caplog.text.count(f"{said} does not store") == 1


@pytest.mark.slow
def test_state_passes_the_conformance_kit_in_wide_and_in_int8_elements_L3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    install_on_simulator(tmp_path / "site", monkeypatch)
    with installed(tmp_path / "vendor", stand_in_ops(), functions=LAUNCHED):
        assert main(["conformance", "--backend", "gcu", "--op", "gcu.paged"]) == 0
