"""What a family does not implement, or a config does not say, is an error that names the key."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from evener.errors import ArchitectureError
from evener.layers import AttentionConfig, Builder, DecoderLayer, MLPConfig, RotaryConfig
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_models import descriptor
from evener_models.alibi import alibi_slopes
from evener_models.qwen import ntk_alpha

FIVE = [1.0, 1.5, 2.0, 2.5, 3.0]


def declare(name: str, **changes: Any) -> Builder:
    build = Builder("float32", 64)
    config = {**find_architecture(f"{name}ForCausalLM").tiny_config(), **changes}
    find_architecture(f"{name}ForCausalLM")({k: v for k, v in config.items() if v != "absent"}, build)
    return build


@pytest.mark.parametrize(
    ("family", "changes", "names"),
    [
        ("Llama", {"hidden_act": "relu6"}, ["hidden_act", "relu6", "silu"]),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}},
            ["rope_type", "proportional", "llama3"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}},
            ["longrope", "short_factor", "5 numbers"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4, "short_factor": FIVE, "long_factor": FIVE}},
            ["longrope", "original_max_position_embeddings"],
        ),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, ["dynamic", "factor"]),
        ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, ["low_freq_factor"]),
        ("Llama", {"rope_parameters": {"rope_type": "default"}}, ["rope_theta"]),
        ("Llama", {"rope_parameters": {"rope_theta": "1e4"}}, ["rope_theta", "'1e4'", "number"]),
        ("Llama", {"partial_rotary_factor": 2}, ["partial_rotary_factor = 2", "at most 1"]),
        (
            "Glm",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1000}},
            ["factor = 1000", "at most 1"],
        ),
        ("Qwen2Moe", {"partial_rotary_factor": float("nan")}, ["partial_rotary_factor = nan"]),
        ("Llama", {"partial_rotary_factor": 0.3}, ["3 dimensions", "even number", "head_dim"]),
        ("DeepseekV32", {"index_head_dim": 2}, ["6 dimensions", "the heads have 2"]),
        (
            "DeepseekV2",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            ["qk_rope_head_dim = 6"],
        ),
        ("DeepseekV32", {"q_lora_rank": None}, ["indexer", "q_lora_rank"]),
        ("Llama", {"rope_parameters": {"rope_theta": float("nan")}}, ["rope_theta = nan", "above 1"]),
        ("Llama", {"rope_parameters": {"rope_theta": 0}}, ["rope_theta = 0", "above 1"]),
        ("Llama", {"rope_parameters": None, "rope_theta": -1}, ["rope_theta = -1", "above 1"]),
        ("Llama", {"rope_parameters": "default"}, ["rope_parameters = 'default'", "object"]),
        ("Llama", {"rope_parameters": None, "rope_scaling": [1]}, ["rope_scaling = [1]", "object"]),
        ("Llama", {"rope_parameters": None, "rope_scaling": {"type": ["linear"]}}, ["['linear']", "not implemented"]),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            ["high_freq_factor = 4", "above low_freq_factor = 4"],
        ),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, ["factor = 0"]),
        (
            "Llama",
            {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}},
            ["NTK"],
        ),
        ("Mixtral", {"num_experts_per_tok": 9}, ["9 of 5 experts"]),
        ("DeepseekV3", {"n_group": 5}, ["12 experts", "5 equal groups"]),
        ("Qwen2Moe", {"mlp_only_layers": 3}, ["mlp_only_layers = 3", "list"]),
        ("Llama", {"attention_bias": "no"}, ["attention_bias = 'no'", "true or false"]),
        ("Llama", {"hidden_size": "absent"}, ["hidden_size"]),
        ("Llama", {"rms_norm_eps": None}, ["rms_norm_eps"]),
        ("Llama", {"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "positive number"]),
        ("Llama", {"hidden_size": 10**12}, ["hidden_size", "whole number"]),
        ("Llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers", "whole number"]),
        ("Llama", {"num_attention_heads": "six"}, ["num_attention_heads", "whole number"]),
        ("Mistral", {"sliding_window": 0}, ["sliding_window", "whole number"]),
        ("Llama", {"num_key_value_heads": 4}, ["num_key_value_heads", "num_attention_heads = 6"]),
        ("Llama", {"head_dim": None, "hidden_size": 61}, ["num_attention_heads", "hidden_size = 61"]),
        ("Mistral", {"rope_parameters": "absent"}, ["rope_theta", "rope_parameters"]),
        ("Mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ("Mistral", {"attention_bias": True}, ["attention_bias"]),
        ("Qwen2", {"rope_parameters": "absent"}, ["rope_theta"]),
        ("Qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 3"]),
        ("Qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, ["layer_types"]),
        ("Qwen2", {"max_window_layers": None}, ["max_window_layers"]),
        ("Qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, ["sliding_window"]),
        ("Qwen3", {"head_dim": None}, ["head_dim"]),
        ("Gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("Gemma3", {"query_pre_attn_scalar": None}, ["query_pre_attn_scalar"]),
        ("Gemma3", {"layer_types": None}, ["layer_types", "sliding_window_pattern"]),
        ("Gemma3", {"rope_parameters": None, "rope_theta": 1e6}, ["rope_local_base_freq"]),
        (
            "Gemma3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": 1e6},
            ["sliding_attention"],
        ),
    ],
)
def test_a_config_value_that_is_missing_or_not_implemented_is_named(
    family: str, changes: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(ArchitectureError) as error:
        declare(family, **changes)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "biased"),
    [
        ({"hidden_size": 5120, "num_attention_heads": 40, "max_position_embeddings": "absent"}, True),
        ({"hidden_size": 5120, "num_attention_heads": 40}, True),
        ({"hidden_size": 4096, "num_attention_heads": 32}, False),
        ({"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": "absent"}, False),
    ],
)
def test_baichuan_uses_alibi_by_hidden_size(sizes: dict[str, Any], biased: bool) -> None:
    [kind] = {(slot.attention.slopes is not None) for slot in declare("Baichuan", **sizes).slots}
    assert kind is biased


def test_the_ntk_alpha_of_qwen_1_grows_in_steps_of_powers_of_two() -> None:
    assert [ntk_alpha(n, 8) for n in (1, 8, 9, 16, 17, 32, 33)] == [1, 1, 3, 3, 7, 7, 15]


def test_qwen_1_within_its_trained_length_does_not_scale_queries() -> None:
    made, config = find_architecture("QWenLMHeadModel"), find_architecture("QWenLMHeadModel").tiny_config()
    for length, scaled in ((256, False), (257, True)):
        build = Builder("float32", length)
        made(config, build)
        assert {s.static["attention"]["query_scale"] for s in build.sites if "attention" in s.static} == {scaled}


PUBLISHED_GLM = {"architectures": ["ChatGLMModel"], "padded_vocab_size": 65024, "rope_ratio": 16}


def test_a_chatglm_with_a_rope_ratio_must_name_its_version() -> None:
    made, tiny = find_architecture("ChatGLMModel"), find_architecture("ChatGLMModel").tiny_config()
    with pytest.raises(ArchitectureError, match=r"rope_ratio = 16 has different .*chatglm2-6b-32k.*chatglm3-6b-32k"):
        made({**tiny, **PUBLISHED_GLM}, Builder("float32", 64))
    for name in ("THUDM/chatglm2-6b-32k", "THUDM/chatglm3-6b-32k"):
        made({**tiny, **PUBLISHED_GLM, "_name_or_path": name}, Builder("float32", 64))


def test_chatglm_1_is_refused_because_its_attention_is_not_causal() -> None:
    config = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "position_encoding_2d": True,
              "inner_hidden_size": 16384}  # fmt: skip
    with pytest.raises(ArchitectureError, match="in ChatGLM 1, prompt tokens attend to later ones"):
        find_architecture("ChatGLMModel")(config, Builder("float32", 64))


@pytest.mark.parametrize("key", ["no_bias", "clip_qkv", "alibi_bias_max", "qk_ln"])
def test_mpt_variants_that_transformers_does_not_implement_are_refused(key: str) -> None:
    change: dict[str, Any] = {"no_bias": False} if key == "no_bias" else {"attn_config": {key: 6}}
    with pytest.raises(ArchitectureError, match=key):
        declare("Mpt", **change)


def test_alibi_has_one_slope_per_head() -> None:
    layer = AttentionConfig(heads=6, kv_heads=6, head_dim=4, rotary=RotaryConfig(0), slopes=alibi_slopes(5))
    with pytest.raises(ArchitectureError, match="5 slopes for 6 heads"):
        DecoderLayer(Builder("float32", 64), "model.layers.0", 24, layer, MLPConfig(inner=8), 1e-6)


def test_layers_of_a_gemma_share_two_rotary_tables_and_make_two_kinds_of_state() -> None:
    build = declare("Gemma3")
    assert sum(type(weight).__name__ == "Table" for weight in build.weights) == 2
    assert [(slot.spec.kind, slot.spec.window) for slot in build.slots] == [("window", 7)] * 3 + [("full", None)]


@pytest.mark.parametrize("name", descriptor.architectures)
def test_a_tiny_config_runs_on_dummy_weights(name: str) -> None:
    model = NaiveModel(find_architecture(name).tiny_config(), "bfloat16")
    logits = model.logits([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert logits.shape == (10, model.model.vocab_size)
    assert logits.isfinite().all() and logits.float().std() > 0.01


def test_declaring_a_model_imports_no_torch() -> None:
    code = """
import importlib, sys
from evener_models import descriptor
from evener.layers import Builder
for name, where in descriptor.architectures.items():
    module, _, cls = where.partition(':')
    cls = getattr(importlib.import_module(module), cls)
    cls(cls.tiny_config(), Builder('float32', 64))
    print(name)
    assert not {'torch', 'transformers'} & set(sys.modules), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(descriptor.architectures)
