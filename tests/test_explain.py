"""``evener explain`` on the CPU backend: forced ops show where a model's numbers come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener.config import from_overrides
from evener.errors import ConfigError
from evener_conformance.naive.model import find_architecture
from evener_inspection.explanation import explain


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {**find_architecture("LlamaForCausalLM").tiny_config(), "hidden_size": 96, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def rows(model: Path, **forced: str) -> dict[str, Any]:
    keys = {"backend": "cpu", "dtype": "float32", "infer.kv_memory": "4MiB", "infer.max_seq_len": 64}
    found = explain(from_overrides(model, {**keys, **{f"ops.{op}": provider for op, provider in forced.items()}}))
    return {row["op"]: row for row in found["ops"]}


def test_a_forced_op_takes_composites_apart_down_to_where_it_is_called_and_no_further(model: Path) -> None:
    assert rows(model)["decoder_layer"]["provider"] == "cpu/native_decoder_layer"
    found = rows(model, act_and_mul="reference")
    assert found["act_and_mul"]["provider"] == "reference"
    for op in ("decoder_layer", "mlp_block"):
        assert found[op]["provider"] == "expanded"
        (lost,) = found[op]["refused"]
        assert lost == {"provider": f"cpu/native_{op}", "reason": "ops.act_and_mul=reference is about a part of it"}
    assert found["attention_block"]["provider"] == "cpu/native_attention_block"


def test_every_builtin_op_that_the_model_calls_can_be_forced_to_the_reference(model: Path) -> None:
    for op in ("rms_norm", "add_rms_norm", "rotary", "linear", "act_and_mul", "greedy"):
        found = rows(model, **{op: "reference"})
        assert found[op]["provider"] == "reference" and found[op]["sites"] > 0, op


def test_an_op_forced_to_the_package_that_has_it_anyway_changes_nothing(model: Path) -> None:
    assert rows(model, rms_norm="cpu")["decoder_layer"]["provider"] == "cpu/native_decoder_layer"


#: The up-projections of latents are held twice in bfloat16: packed for prompts that expand, and for absorption.
_V3_LATENTS = 61 * 512 * 128 * (128 + 128)
#: Embeddings, the head and routers are in bfloat16; all else is in FP8, with a float32 scale for 128 x 128 numbers.
_V3_PLAIN = 2 * 129_280 * 7168 + 58 * 256 * 7168
_V3_BYTES = 4 * _V3_LATENTS + 2 * _V3_PLAIN + (671.03e9 - _V3_LATENTS - _V3_PLAIN) * (1 + 4 / 128**2)


@pytest.mark.slow
def test_a_model_of_671_billion_parameters_is_explained_and_does_not_fit_here(tmp_path: Path) -> None:
    published = Path(__file__).parent.parent / "models" / "tests" / "data" / "deepseek_v3_config.json"
    (tmp_path / "config.json").write_bytes(published.read_bytes())
    found = explain(from_overrides(tmp_path, {"backend": "cpu", "load": "dummy"}))
    sites = {row["op"]: row["sites"] for row in found["ops"]}
    assert (sites["latent_attention_block"], sites["moe_block"]) == (61, 58)
    assert found["memory"]["weights"] == pytest.approx(_V3_BYTES, rel=1e-3)
    assert "does not fit" in found["memory"]["problem"] and "GiB" in found["memory"]["problem"]


@pytest.mark.slow
def test_a_rank_of_eight_is_explained_with_its_share_of_the_weights(tmp_path: Path) -> None:
    published = Path(__file__).parent.parent / "models" / "tests" / "data" / "deepseek_v3_config.json"
    (tmp_path / "config.json").write_bytes(published.read_bytes())
    found = explain(from_overrides(tmp_path, {"backend": "cpu", "load": "dummy", "infer.tp_size": 8}))
    # Norms, routers and the latents' down-projections are on every rank.
    assert found["memory"]["weights"] == pytest.approx(_V3_BYTES / 8, rel=0.02)


def test_ranks_that_cannot_share_smollm2_are_refused_with_the_sizes_that_fit(smollm2_dir: Path) -> None:
    with pytest.raises(ConfigError) as error:
        explain(from_overrides(smollm2_dir, {"backend": "cpu", "infer.tp_size": 2}))
    assert str(error.value) == (
        "infer.tp_size=2: 9 query heads and 3 KV heads do not come out even; sizes that fit: 1, 3, 9"
    )
    assert explain(from_overrides(smollm2_dir, {"backend": "cpu", "infer.tp_size": 3}))["memory"]["problem"] is None
