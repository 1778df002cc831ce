"""Latent attention: every way to compute it gives transformers' logits and the same tokens, dense and sparse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_check import assert_equal_logits, prompt, reference

from evener.testing.naive import NaiveModel, find_architecture

V2, V3, V32 = (f"Deepseek{name}ForCausalLM" for name in ("V2", "V3", "V32"))
MODES = ("none", "absorb-without-precomp", "absorb")
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 4, "beta_slow": 1, "mscale": 0.707}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": (V2, {}),
    "V2-Lite, which projects queries directly": (V2, {"q_lora_rank": None}),
    "one head": (V2, {"num_attention_heads": 1, "num_key_value_heads": 1, "q_lora_rank": None}),
    "V2 with experts chosen from all": (V2, {"topk_method": "greedy", "n_shared_experts": 1}),
    "V2 over a longer context": (V2, {"qk_rope_head_dim": 16, "rope_parameters": {**YARN, "mscale_all_dim": 0.707}}),
    "V3": (V3, {}),
    "V3 with one group of experts, as Kimi K2 has": (V3, {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    "V3 over a longer context": (
        V3, {"qk_rope_head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    "V3 with biases and rotated halves": (V3, {"attention_bias": True, "rope_interleave": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_absorb_gives_the_logits_of_transformers(case: str, tiny_model: Any) -> None:
    architecture, changes = CASES[case]
    model, folder = tiny_model({**find_architecture(architecture).tiny_config(), **changes})
    ids = prompt(model.config.vocab_size)
    theirs = reference(model, ids)
    for mode in MODES:
        assert_equal_logits(NaiveModel(folder, absorb=mode), theirs, ids)


def test_sparse_attention_gives_the_logits_of_transformers_and_is_not_dense(tiny_model: Any) -> None:
    model, folder = tiny_model(find_architecture(V32).tiny_config())
    ids = prompt(model.config.vocab_size)
    theirs = reference(model, ids)
    assert_equal_logits(NaiveModel(folder), theirs, ids)
    assert (NaiveModel(folder, index_top=0).logits(ids) - theirs).abs().max() > 0.1


@pytest.mark.parametrize("top", [41, 200])
def test_sparse_attention_over_at_least_the_context_is_dense(top: int, tiny_model: Any) -> None:
    model, folder = tiny_model({**find_architecture(V32).tiny_config(), "index_topk": top})
    ids = prompt(model.config.vocab_size)
    theirs = reference(model, ids)
    assert_equal_logits(NaiveModel(folder), theirs, ids)
    assert_equal_logits(NaiveModel(folder, index_top=0), theirs, ids)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float8_e4m3fn"])
def test_ways_to_absorb_agree_over_narrow_latent_state(
    dtype: str, close: float, state_dtype: str, tiny_model: Any
) -> None:
    model, folder = tiny_model(find_architecture(V3).tiny_config())
    ids = prompt(model.config.vocab_size)
    logits = [NaiveModel(folder, dtype, absorb=m, state_dtype=state_dtype).logits(ids, 1).float() for m in MODES]
    scale = float(logits[0].std())
    for other in logits[1:]:
        assert float((other - logits[0]).square().mean().sqrt()) < close * scale
    exact = reference(model, ids)
    # What the state loses is far more than the ways differ by, and far less than the logits are.
    lost = float((logits[0] - exact).square().mean().sqrt())
    assert close * scale < lost < 0.6 * scale if dtype == "float32" else lost < 0.6 * scale


def test_layers_of_multi_token_prediction_are_passed_over(tiny_model: Any) -> None:
    from safetensors.torch import load_file, save_file

    model, folder = tiny_model({**find_architecture(V3).tiny_config(), "num_nextn_predict_layers": 1})
    tensors = load_file(folder / "model.safetensors")
    extra = {f"model.layers.3.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "self_attn.o_proj")}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    ids = prompt(model.config.vocab_size)
    torch.testing.assert_close(NaiveModel(folder).logits(ids), reference(model, ids), atol=1e-4, rtol=1e-4)


#: The published config of the model with 671 billion parameters.
V3_CONFIG = Path(__file__).parent / "data" / "deepseek_v3_config.json"
_DECLARE = """
import json, math, sys
from evener.layers.builder import Builder
from evener.layers.declared import Table
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
    done = subprocess.run(
        [sys.executable, "-c", _DECLARE, str(V3_CONFIG)], capture_output=True, text=True, check=True
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["parameters"] == pytest.approx(671.03e9, rel=1e-4)
    assert (found["layers"], found["values"], found["torch"]) == (61, 576, False)
    assert found["declared"] < 61 * 25, "experts are one stacked weight a projection"
