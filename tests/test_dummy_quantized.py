"""``load=dummy`` with the ``config.json`` of a quantized model: weights in the formats of the real checkpoint, packed,
with the same plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from family_runner import SMALL
from stored_models import KEPT, SIZES, greedy, prompt
from test_explain_quantized import AWQ, DEEPSEEK_V3, FP8, GPTQ, QWEN3_8B, awq, explained, fp8, gptq, held, write
from test_integers_end_to_end import FACTORED, KINDS, checkpoint

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain

KEPT_PLAIN = [f"re:.*{name}.*" for name in KEPT]


def compressed(form: str, weights: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "symmetric": True, "type": weights["type"], **how} if how else None
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": KEPT_PLAIN, "config_groups": {"a": group}}


TOKEN = {"dynamic": True, "strategy": "token"}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
#: Methods that no test module has files of, and the storage of their weights.
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "fp8 blocks": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
                   "float8_e4m3fn"),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, "float8_e4m3fn"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "float8_e4m3fn"),
    "w8a8": (compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, **TOKEN), "int8"),
    "w4a8": (compressed("int-quantized", FOUR, **TOKEN), "uint4"),
    "fp8 tensor": (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"},
                              dynamic=False, strategy="tensor"), "float8_e4m3fn"),
    "halves": ({"quant_method": "gptq", "layout": "halves", "bits": 4, "group_size": 32, "sym": True}, "uint4"),
    "w4afp8": ({"quant_method": "w4afp8", "group_size": 32}, "uint4 float8_e4m3fn"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "float8_e4m3fn"),
}  # fmt: skip


def described(folder: Path, family: str, settings: Mapping[str, Any]) -> Path:
    """A folder with a config and nothing else."""
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 2}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


#: ``load=dummy`` makes no weights of bitsandbytes, and says so.
MADE = {kind: settings for kind, (_, settings) in {**KINDS, **FACTORED}.items()
        if settings["quant_method"] != "bitsandbytes"}  # fmt: skip


@pytest.mark.parametrize("family", [pytest.param("Qwen3", marks=pytest.mark.slow), "Qwen3Moe"])
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("gptq 3 act", "awq", "awq of modelopt") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in MADE
    ],
)
def test_the_plan_is_that_of_the_real_checkpoint(kind: str, family: str, tmp_path: Path, one_thread: None) -> None:
    _, real = checkpoint(tmp_path / "real", family, kind)
    folder = described(tmp_path / "described", family, MADE[kind])
    wanted = explain(from_overrides(str(real), SMALL))
    for keys in ({**SMALL, "load": "dummy"}, SMALL):
        found = explain(from_overrides(str(folder), keys))
        assert found["packings"] == wanted["packings"] and found["dequantized"] == wanted["dequantized"]
        assert held(found) == held(wanted) and found["model"]["problem"] is None
    _, ready = build_controller(from_overrides(str(folder), {**SMALL, "load": "dummy"}))
    assert ready.info.memory.weights == held(found)


@pytest.mark.parametrize(
    "kind", [kind if kind in ("fp8 blocks", "w4afp8") else pytest.param(kind, marks=pytest.mark.slow) for kind in MORE]
)
def test_weights_of_every_method_are_made_and_computed_with(kind: str, tmp_path: Path, one_thread: None) -> None:
    settings, storage = MORE[kind]
    folder = described(tmp_path, "Qwen3Moe", settings)
    found = explain(from_overrides(str(folder), {**SMALL, "load": "dummy"}))
    packed = {"cpu.blocks" if each == "uint4" else "cpu.stored" for each in storage.split()}
    assert sum(found["packings"][each] for each in packed) == 8 and not found["dequantized"]
    ids = prompt("Qwen3Moe")
    first, second = (greedy(folder, ids, 8, load="dummy", seed=seed) for seed in (0, 1))
    assert len(first) == 8 and first == greedy(folder, ids, 8, load="dummy") and first != second


def test_two_ranks_have_their_pieces_of_quantized_weights(tmp_path: Path, one_thread: None) -> None:
    folder = described(tmp_path, "Qwen3Moe", KINDS["gptq 4 act"][1])
    config = from_overrides(str(folder), {**SMALL, "load": "dummy", "infer.tp_size": 2})
    request = NewRequest(id="a", prompt=prompt("Qwen3Moe"), max_tokens=5, sampling=Sampling(temperature=0.0))
    with rank_threads(config) as (controller, _):
        assert len(play(controller, [request]).tokens["a"]) == 5
    assert explain(config)["packings"]["cpu.blocks"] == 8


def test_without_load_dummy_the_missing_weights_are_named_and_an_unknown_method_is_refused(tmp_path: Path) -> None:
    folder = described(tmp_path, "Qwen3", MORE["w4a8"][0])
    with pytest.raises(CheckpointError, match=r"has no weights: no model\.safetensors.*or use load=dummy"):
        build_controller(from_overrides(str(folder), SMALL))
    described(tmp_path, "Qwen3", {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(CheckpointError, match="load=dummy makes none in the format 'bitsandbytes'"):
        build_controller(from_overrides(str(folder), {**SMALL, "load": "dummy"}))


@pytest.mark.parametrize(("quantization", "store"), [(AWQ, awq), (GPTQ, gptq)], ids=["AWQ", "GPTQ"])
def test_qwen3_8b_by_its_config_alone_has_the_plan_of_its_files(
    quantization: Mapping[str, Any], store: Any, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/config.json").write_text(json.dumps({**QWEN3_8B, "quantization_config": quantization}))
    wanted, found = explained(write(tmp_path, QWEN3_8B, quantization, store)), explained(tmp_path / "alone")
    assert found["packings"] == wanted["packings"] and held(found) == held(wanted)


@pytest.mark.slow
def test_deepseek_v3_by_its_config_alone_has_the_plan_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/config.json").write_text(json.dumps({**DEEPSEEK_V3, "quantization_config": FP8}))
    wanted, found = explained(write(tmp_path, DEEPSEEK_V3, FP8, fp8)), explained(tmp_path / "alone")
    # A layer's up-projection of latents is read as a matrix for each head too; both must have the same numbers, so
    # load=dummy makes it plain.
    assert found["packings"]["plain"] == wanted["packings"]["plain"] + 61
    assert sum(found["packings"].values()) == sum(wanted["packings"].values())
    assert held(found) == pytest.approx(held(wanted), rel=3e-3)
