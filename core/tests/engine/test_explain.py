"""``evener explain``: what a run would use, and whether it fits, before a weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from evener.cli.main import main
from evener.config.schema import Config
from evener.engine.processes.start import build_controller
from evener.errors import ConfigError, UnknownNameError
from evener.ops.reference.state import ReferenceState
from evener_formats.safetensors_files import SafetensorsFile
from evener_inspection.explanation import explain

#: 405 billion weights.
GIANT = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384,
    "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def giant(tmp_path: Path, reference: Path) -> Path:
    del reference
    (tmp_path / "config.json").write_text(json.dumps(GIANT))
    return tmp_path


def test_explain_matches_what_a_run_uses(make_config: Any) -> None:
    config: Config = make_config("Gemma3")
    found, (_, ready) = explain(config), build_controller(config)
    info: Any = ready.info
    assert found["ops"] == [row for row in msgspec.to_builtins(info.manifest.ops) if row["op"] != "attention"]
    assert found["packings"] == info.manifest.packings and found["fallbacks"] == info.manifest.fallbacks
    for name in ("weights", "tables", "workspace", "state", "blocks", "block_bytes"):
        assert found["memory"][name] == info.memory.to_json()[name], name
    assert found["graphs"]["reason"] in info.manifest.notes


def test_explain_lists_provider_sizes_and_rejected_providers_of_each_state_group(make_config: Any) -> None:
    found = explain(make_config("Gemma3"))
    kinds = {group["kind"] for group in found["state"]}
    assert kinds == {"full", "window"}
    for group in found["state"]:
        assert group["provider"] == "reference" and group["layer_bytes_per_block"] > 0 and group["layers"] > 0
        assert (group["window"] is not None) == (group["kind"] == "window")
    assert found["communicator"] == {"ranks": 1, "package": None, "used": False}


def test_explain_names_the_provider_of_scratch_memory(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Config = make_config("Gemma3")
    assert "scratch" not in " ".join(explain(config)["memory"]["lines"])
    monkeypatch.setattr(ReferenceState, "workspace", lambda self, spec, attention, tokens, longest: 3 << 20)
    found = explain(config)
    assert found["memory"]["lines"][-1] == "the workspace holds 3.0 MiB of scratch memory for reference"


def test_explain_works_with_only_a_config_json(giant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(giant), "--backend", "reference", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["weights"] == "described by config.json alone"
    memory = found["memory"]
    assert memory["weights"] == pytest.approx(2 * 405.85e9, rel=0.001) and memory["mapped"] == 0
    assert "its weights take 755.9" in memory["problem"] and "are free" in memory["problem"]
    assert "checkpoint that stores them in fewer bits" in memory["problem"]
    rows = {row["op"]: row for row in found["ops"]}
    assert rows["decoder_layer"]["sites"] == 126 and rows["decoder_layer"]["tokens"] == ["1..2048"]


@pytest.mark.slow
def test_explain_text_output_matches_json(giant: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(giant), "--backend", "reference"]) == 1
    text = capsys.readouterr().out
    for part in ("LlamaForCausalLM in bfloat16", "126 layers full", "decoder_layer", "1..2048", "communicator: none",
                 "weights", "755.9", "the model does not fit"):  # fmt: skip
        assert part in text


def test_a_small_model_fits(make_config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config: Config = make_config()
    words = ["load=dummy", "infer.kv_memory=4MiB", "infer.max_seq_len=128", "infer.max_reqs=4", "infer.step_tokens=24"]
    assert main(["explain", config.model, "--backend", "reference", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "it fits"


@pytest.fixture
def wrong_names(make_lively: Any, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a model's weights one has another name and one another shape; who reads a tensor fails."""
    config: Config = make_lively()
    file = Path(config.model) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.attn.q_proj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()
    save_file(tensors, file, {"format": "pt"})

    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsFile, "tensor", read)
    return config


def test_explain_reports_wrong_weight_names_and_shapes_from_headers(
    wrong_names: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain(wrong_names)
    problem = found["model"]["problem"]
    assert "1 tensor is missing: model.layers.0.self_attn.q_proj.weight" in problem
    assert "1 tensor is not part of the model: model.layers.0.attn.q_proj.weight" in problem
    assert "1 tensor is of another shape than config.json implies: model.norm.weight is [" in problem
    assert found["memory"]["problem"] is None
    words = ["infer.kv_memory=4MiB", "infer.max_seq_len=128", "infer.max_reqs=4", "infer.step_tokens=24"]
    assert main(["explain", wrong_names.model, "--backend", "reference", "dtype=float32", *words]) == 1
    assert "it fits\nbut the weights in" in capsys.readouterr().out


def test_explain_accepts_matching_weights_with_and_without_pipeline_stages(make_lively: Any) -> None:
    for more in ({}, {"infer.pp_size": 2}, {"infer.tp_size": 2}):
        found = explain(make_lively("Llama", None, **more))
        assert found["model"] == {**found["model"], "weights": "read from its files", "problem": None}


def test_unknown_op_and_provider_errors_suggest_the_nearest_name(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'ops.rms_nrom'.* did you mean 'ops.rms_norm'"):
        make_config(**{"ops.rms_nrom": "reference"})
    with pytest.raises(UnknownNameError, match=r"provider of rms_norm 'referense'.* did you mean 'reference'"):
        explain(make_config(**{"ops.rms_norm": "referense"}))


def test_declaring_and_estimating_a_large_model_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import json, sys\n"
        "from evener.contracts.quant import Packing\n"
        "from evener.layers.builder import Builder\n"
        "from evener.loading.estimate import estimate_weights\n"
        "from evener.plugins.discover import installed_catalog\n"
        "class Plain(Packing):\n"
        "    layout = 'plain'\n"
        "    def supports(self, parts, dtype): return None\n"
        "    def nbytes(self, parts, dtype): return sum(p.rows * p.columns * 2 for p in parts)\n"
        "    def pack(self, parts, dtype, device): raise AssertionError\n"
        "config = json.load(sys.stdin)\n"
        "found = installed_catalog().lazy_imports('architecture')\n"
        "build = Builder('bfloat16', 4096)\n"
        "found[config['architectures'][0]].load()(config, build)\n"
        "for weight in build.weights:\n"
        "    if hasattr(weight, 'layout'): weight.layout = 'plain'\n"
        "print(estimate_weights(build.weights, {'plain': Plain()}, None).allocated)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(GIANT), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == pytest.approx(2 * 405.85e9, rel=0.001)
