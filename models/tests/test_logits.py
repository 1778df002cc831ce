"""What the table of families (``tests/family_table.py``) cannot say in a row: spellings of a config, files, caps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import logits_of
from family_runner import assert_naive_logits, prompt_of
from family_table import GEMMA, LLAMA, QWEN2, TABLE, Row

from evener_conformance.naive.model import NaiveModel


def assert_same(folder: Path, model: Any) -> None:
    """The naive engine, reading ``folder``, gives the logits of transformers' model."""
    ids = prompt_of(model.config.vocab_size)
    assert_naive_logits(NaiveModel(folder), logits_of(model)(ids), ids)


def test_capped_attention_scores_equal_transformers_where_it_applies_the_cap(tiny_model: Any) -> None:
    from transformers.models.gemma3 import modeling_gemma3 as gemma3

    model, folder = tiny_model(Row(GEMMA, {"attn_logit_softcapping": 2.0}))
    ids = prompt_of(model.config.vocab_size)
    uncapped, eager = logits_of(model)(ids), gemma3.eager_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma3, "eager_attention_forward", lambda *a, **k: eager(*a, **{**k, "softcap": 2.0}))
        capped = logits_of(model)(ids)
    assert (capped - uncapped).abs().max() > 0.01
    assert_naive_logits(NaiveModel(folder), capped, ids)


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
    model, folder = tiny_model(TABLE[case])
    rewrite(folder, change)
    assert_same(folder, model)


def test_a_llama_config_from_before_rope_theta_existed_means_10000_as_in_transformers(tiny_model: Any) -> None:
    model, folder = tiny_model(Row(LLAMA, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}))
    rewrite(folder, lambda config: config.pop("rope_parameters"))
    assert_same(folder, model)


def test_a_sharded_checkpoint_gives_the_same_logits(tiny_model: Any) -> None:
    model, folder = tiny_model(Row(LLAMA), max_shard_size="100kB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same(folder, model)


def test_greedy_tokens_equal_transformers_generate(tiny_model: Any) -> None:
    model, folder = tiny_model(Row(QWEN2))
    ids = prompt_of(model.config.vocab_size, 13)
    model.generation_config.eos_token_id = None
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    ours = NaiveModel(folder)
    assert ours.greedy(ids, 20) == theirs
    assert max(ours.greedy_gaps(ids, theirs)) == 0.0


@pytest.mark.slow
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
