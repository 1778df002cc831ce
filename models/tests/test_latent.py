"""Latent attention, beside its rows in the table of families: every way to compute it gives the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import logits_of
from family_runner import check, prompt_of
from family_table import TABLE, V2, V3, V32, Row

from evener_conformance.naive.model import NaiveModel

MODES = ("none", "absorb-without-precomp", "absorb")
LATENT = [name for name, row in TABLE.items() if row.architecture in (V2, V3)]
#: Each mode with its hardest options: rotated halves and biases, and queries that are projected directly.
QUICK = {
    ("deepseek V3 with biases and rotated halves", "none"),
    ("deepseek V2-Lite, which projects queries directly", "absorb"),
}
ROWS_IN_MODES = [
    pytest.param(case, mode, marks=[] if (case, mode) in QUICK else pytest.mark.slow)
    for case in LATENT for mode in ("none", "absorb")
]  # fmt: skip
assert {(case, mode) for case in LATENT for mode in ("none", "absorb")} >= QUICK


@pytest.mark.parametrize(("case", "mode"), ROWS_IN_MODES)
def test_absorb_modes_give_the_logits_of_the_default(case: str, mode: str, tmp_path: Path, one_thread: None) -> None:
    check(replace(TABLE[case], keys={"infer.mla_absorb": mode}), tmp_path)


def test_sparse_attention_is_not_dense(tiny_model: Any) -> None:
    model, folder = tiny_model(Row(V32))
    ids = prompt_of(model.config.vocab_size)
    dense = NaiveModel(folder, index_top=0).logits(ids)
    assert (dense - logits_of(model)(ids)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("state_dtype", "dtype", "close"),
    [("float8_e4m3fn", "float32", 1e-4), ("bfloat16", "bfloat16", 0.1),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (
         ("bfloat16", "float32", 1e-4), ("float8_e4m3fn", "bfloat16", 0.1)))],
)  # fmt: skip
def test_absorb_modes_agree_over_narrow_latent_state(
    dtype: str, close: float, state_dtype: str, tiny_model: Any, one_thread: None
) -> None:
    # Rounding to bf16 may make another expert the better one, and then the logits are others: no experts there.
    model, folder = tiny_model(Row(V3, {} if dtype == "float32" else {"first_k_dense_replace": 3}))
    ids = prompt_of(model.config.vocab_size)
    logits = [NaiveModel(folder, dtype, absorb=m, state_dtype=state_dtype).logits(ids, 1).float() for m in MODES]
    scale = float(logits[0].std())
    for other in logits[1:]:
        assert float((other - logits[0]).square().mean().sqrt()) < close * scale
        best = logits[0].topk(2).values
        clear = best[:, 0] - best[:, 1] > 5 * close * scale
        assert torch.equal(other.argmax(-1)[clear], logits[0].argmax(-1)[clear]) and clear.sum() > 5
    exact = logits_of(model)(ids)
    # What the state loses is far more than the ways differ by, and far less than the logits are.
    lost = float((logits[0] - exact).square().mean().sqrt())
    assert close * scale < lost < 0.6 * scale if dtype == "float32" else lost < 0.6 * scale


def test_layers_of_multi_token_prediction_are_not_read(tiny_model: Any) -> None:
    from safetensors.torch import load_file, save_file

    model, folder = tiny_model(Row(V3, {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    extra = {f"model.layers.3.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "self_attn.o_proj")}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    ids = prompt_of(model.config.vocab_size)
    torch.testing.assert_close(NaiveModel(folder).logits(ids), logits_of(model)(ids), atol=1e-4, rtol=1e-4)


#: The published config of the model with 671 billion parameters.
V3_CONFIG = Path(__file__).parent / "data" / "deepseek_v3_config.json"
_DECLARE = """
import json, math, sys
from evener.layers.builder import Builder
from evener.contracts.declared import Table
from evener_models.deepseek_v3 import DeepseekV3ForCausalLM
build = Builder("bfloat16", 4096, absorb="none")
model = DeepseekV3ForCausalLM(json.load(open(sys.argv[1])), build)
linears = [w for w in build.weights if hasattr(w, "parts")]
others = [w for w in build.weights if hasattr(w, "shape") and not hasattr(w, "parts")]
each = lambda w: sum(p.rows * p.columns for p in w.parts)
count = sum(max(w.experts, 1) * each(w) for w in linears) + sum(math.prod(w.shape) for w in others)
spec = build.slots[0].spec
print(json.dumps({"parameters": count, "declared": len(build.weights), "values": sum(t.shape[0] for t in spec.tensors),
    "layers": len(build.slots), "torch": "torch" in sys.modules}))
"""


def test_the_published_671b_config_is_declared_without_torch_and_has_671_billion_parameters() -> None:
    done = subprocess.run([sys.executable, "-c", _DECLARE, str(V3_CONFIG)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["parameters"] == pytest.approx(671.03e9, rel=1e-4)
    assert (found["layers"], found["values"], found["torch"]) == (61, 576, False)
    assert found["declared"] < 61 * 25, "experts are one stacked weight a projection"
