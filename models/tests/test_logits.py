"""Tiny random models of every family give transformers' logits, however the prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_check import assert_equal_logits, prompt, reference

from evener.testing.naive import NaiveModel, find_architecture

LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA = (
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")
)
PLAIN_ROPE = {"rope_theta": 20000.0, "rope_type": "default"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with llama3 rope": (LLAMA, {}),
    "llama with biases everywhere, tied": (
        LLAMA, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE}),
    "llama with linear rope and one KV head": (
        LLAMA, {"num_key_value_heads": 1, "rope_parameters": {**PLAIN_ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama with as many KV heads as heads, without head_dim": (LLAMA, {"num_key_value_heads": None, "head_dim": None}),
    "mistral with a window": (MISTRAL, {}),
    "mistral without": (MISTRAL, {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2 with windows above layer 1": (QWEN2, {}),
    "qwen2 with a window by layer type": (
        QWEN2, {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "tie_word_embeddings": False}),
    "qwen2 whose window is switched off": (QWEN2, {"use_sliding_window": False, "num_key_value_heads": 1}),
    "qwen3": (QWEN3, {}),
    "qwen3 with biases, untied": (
        QWEN3, {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 5}),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2 moe": ("Qwen2MoeForCausalLM", {}),
    "qwen2 moe renormalised": ("Qwen2MoeForCausalLM", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3 moe with an MLP in every other layer": ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}),
    "glm 4.5 with groups": ("Glm4MoeForCausalLM", {}),
    "glm 4.5 with one group, without head norms": (
        "Glm4MoeForCausalLM", {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "num_key_value_heads": 5}),
    "seed-oss": ("SeedOssForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma 2": ("Gemma2ForCausalLM", {}),
    "gemma 3": (GEMMA, {}),
    "gemma 3 by pattern with capped logits": (
        GEMMA, {"layer_types": None, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0}),
    "gemma 3 with biases, untied": (
        GEMMA, {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 3}),
}  # fmt: skip


#: Families whose rows are in a table of their own, because their state is not keys and values.
ELSEWHERE = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Qwen3NextForCausalLM"}


def test_every_family_has_a_row() -> None:
    from evener_models import descriptor

    assert set(descriptor.architectures) == {architecture for architecture, _ in CASES.values()} | ELSEWHERE


def tiny(architecture: str, **changes: Any) -> dict[str, Any]:
    config = {**find_architecture(architecture).tiny_config(), **changes}
    return {
        key: value
        for key, value in config.items()
        if key not in changes or value is not None or key == "sliding_window"
    }


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_one_piece_in_chunks_and_token_by_token(case: str, tiny_model: Any) -> None:
    architecture, changes = CASES[case]
    model, folder = tiny_model(tiny(architecture, **changes))
    ids = prompt(model.config.vocab_size)
    assert_equal_logits(NaiveModel(folder), reference(model, ids), ids)


def test_capped_attention_scores_equal_transformers_where_it_applies_the_cap(tiny_model: Any) -> None:
    from transformers.models.gemma3 import modeling_gemma3 as gemma3

    model, folder = tiny_model(tiny(GEMMA, attn_logit_softcapping=2.0))
    ids = prompt(model.config.vocab_size)
    uncapped, eager = reference(model, ids), gemma3.eager_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma3, "eager_attention_forward", lambda *a, **k: eager(*a, **{**k, "softcap": 2.0}))
        capped = reference(model, ids)
    assert (capped - uncapped).abs().max() > 0.01
    assert_equal_logits(NaiveModel(folder), capped, ids)


def rewrite(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def old_flat(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope


def old_gemma(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["rope_theta"] = rope["full_attention"].pop("rope_theta")
    config["rope_scaling"] = rope["full_attention"]
    config.pop("layer_types")
    config["sliding_window_pattern"] = 4


def flat_gemma(config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    config["rope_parameters"] = rope["full_attention"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]


def very_old_scaling(config: dict[str, Any]) -> None:
    config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = 20000.0, {"type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama with llama3 rope", old_flat),
        ("llama with linear rope and one KV head", old_flat),
        ("llama with linear rope and one KV head", very_old_scaling),
        ("mistral with a window", old_flat),
        ("qwen3", old_flat),
        ("gemma 3", old_gemma),
        ("gemma 3", flat_gemma),
    ],
)
def test_both_spellings_of_rope_settings_give_the_same_logits(case: str, change: Any, tiny_model: Any) -> None:
    architecture, changes = CASES[case]
    model, folder = tiny_model(tiny(architecture, **changes))
    rewrite(folder, change)
    ids = prompt(model.config.vocab_size)
    torch.testing.assert_close(NaiveModel(folder).logits(ids), reference(model, ids), atol=1e-4, rtol=1e-4)


def test_a_llama_config_from_before_rope_theta_existed_means_10000_as_in_transformers(tiny_model: Any) -> None:
    model, folder = tiny_model(tiny(LLAMA, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}))
    rewrite(folder, lambda config: config.pop("rope_parameters"))
    ids = prompt(model.config.vocab_size)
    torch.testing.assert_close(NaiveModel(folder).logits(ids), reference(model, ids), atol=1e-4, rtol=1e-4)


def test_a_sharded_checkpoint_gives_the_same_logits(tiny_model: Any) -> None:
    model, folder = tiny_model(tiny(LLAMA), max_shard_size="100kB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    ids = prompt(model.config.vocab_size)
    torch.testing.assert_close(NaiveModel(folder).logits(ids), reference(model, ids), atol=1e-4, rtol=1e-4)


def test_greedy_tokens_equal_transformers_generate(tiny_model: Any) -> None:
    model, folder = tiny_model(tiny(QWEN2))
    ids = prompt(model.config.vocab_size, 13)
    model.generation_config.eos_token_id = None
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    ours = NaiveModel(folder)
    assert ours.greedy(ids, 20) == theirs
    assert max(ours.greedy_gaps(ids, theirs)) == 0.0


def test_a_real_chat_model_answers_like_transformers(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = NaiveModel(smollm2_dir, max_positions=256).greedy(ids, 12, stop=(2,))
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert answer == theirs
    assert "Paris" in tokenizer.decode(answer)
