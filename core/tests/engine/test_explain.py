"""``evener explain``: what a run would use, and whether it fits, before a weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.cli.explain import explain
from evener.cli.main import main
from evener.config.schema import Config
from evener.engine.start import build_controller
from evener.errors import ConfigError, UnknownNameError

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


def test_what_is_explained_is_what_a_run_then_uses(make_config: Any) -> None:
    config: Config = make_config("Gemma3")
    found, (_, ready) = explain(config), build_controller(config)
    info: Any = ready.info
    assert found["ops"] == [row for row in info["manifest"]["ops"] if row["op"] != "attention"]
    assert found["packings"] == info["manifest"]["packings"] and found["fallbacks"] == info["manifest"]["fallbacks"]
    for name in ("weights", "tables", "workspace", "state", "blocks", "block_bytes"):
        assert found["memory"][name] == info["memory"][name], name
    assert found["graphs"]["reason"] in info["manifest"]["notes"]


def test_each_state_group_has_its_provider_its_sizes_and_the_losers(make_config: Any) -> None:
    found = explain(make_config("Gemma3"))
    kinds = {group["kind"] for group in found["state"]}
    assert kinds == {"full", "window"}
    for group in found["state"]:
        assert group["provider"] == "reference" and group["layer_bytes_per_block"] > 0 and group["layers"] > 0
        assert (group["window"] is not None) == (group["kind"] == "window")
    assert found["communicator"] == {"ranks": 1, "package": None, "used": False}


def test_a_folder_with_a_config_alone_is_explained_as_it_is_described(
    giant: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(giant), "--backend", "reference", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["weights"] == "described by config.json alone"
    memory = found["memory"]
    assert memory["weights"] == pytest.approx(2 * 405.85e9, rel=0.001) and memory["mapped"] == 0
    assert "its weights take 755.9" in memory["problem"] and "are free" in memory["problem"]
    assert "checkpoint that stores them in fewer bits" in memory["problem"]
    rows = {row["op"]: row for row in found["ops"]}
    assert rows["decoder_layer"]["sites"] == 126 and rows["decoder_layer"]["tokens"] == ["1..2048"]


def test_the_text_says_the_same_to_a_person(giant: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_wrong_op_and_a_wrong_provider_come_with_the_nearest(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'ops.rms_nrom'.* did you mean 'ops.rms_norm'"):
        make_config(**{"ops.rms_nrom": "reference"})
    with pytest.raises(UnknownNameError, match=r"provider of rms_norm 'referense'.* did you mean 'reference'"):
        explain(make_config(**{"ops.rms_norm": "referense"}))


def test_declaring_and_estimating_a_giant_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import json, sys\n"
        "from evener.contracts.quant import Packing\n"
        "from evener.layers.builder import Builder\n"
        "from evener.loading.estimate import estimate_weights\n"
        "from evener.plugins.catalog import targets\n"
        "from evener.plugins.discover import discover\n"
        "class Plain(Packing):\n"
        "    layout = 'plain'\n"
        "    def supports(self, parts, dtype): return None\n"
        "    def nbytes(self, parts, dtype): return sum(p.rows * p.columns * 2 for p in parts)\n"
        "    def pack(self, parts, dtype, device): raise AssertionError\n"
        "config = json.load(sys.stdin)\n"
        "found = {t.name: t for t in targets(discover().packages, 'architecture')}\n"
        "build = Builder('bfloat16', 4096)\n"
        "found[config['architectures'][0]].load()(config, build)\n"
        "for weight in build.weights:\n"
        "    if hasattr(weight, 'layout'): weight.layout = 'plain'\n"
        "print(estimate_weights(build.weights, {'plain': Plain()}, None).counted)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(GIANT), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == pytest.approx(2 * 405.85e9, rel=0.001)
