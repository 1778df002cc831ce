"""The table of families: each architecture that is registered has a row here, and each row is checked in the same way
(``family_runner``) by ``test_families.py``.

A row's config is its class's ``tiny_config`` with ``changes``. A family without transformers' implementation gets an
oracle in plain torch (``family_oracles.Plain``). Give a new architecture rows with one key/value head and with as many
as heads, and with one group of experts and several, where it has them: a test asks for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from family_oracles import TRANSFORMERS, Oracle, Plain
from reference_baichuan import Baichuan13B
from reference_models import Baichuan, ChatGLM, Qwen
from reference_vision import QwenVL

from evener.contracts.architecture import Architecture
from evener_conformance.naive.model import find_architecture

#: A change that takes a key out of the config.
ABSENT = "absent"


@cache
def architecture(name: str) -> type[Architecture]:
    """The class that is registered under ``name``; entry points are read once for each, not for each row."""
    return find_architecture(name)


@dataclass(frozen=True)
class Row:
    """One tiny model and its oracle.

    Attributes:
        architecture: the name in ``config.json``.
        changes: of the class's tiny config; ``ABSENT`` removes a key.
        oracle: what it is compared with.
        tolerance: absolute, of logits and log-probabilities.
        keys: of the engine's configuration, beside the runner's own.
    """

    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    oracle: Oracle = TRANSFORMERS
    tolerance: float = 1e-4
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        merged = {**architecture(self.architecture).tiny_config(), **self.changes}
        return {key: value for key, value in merged.items() if value != ABSENT}

    @property
    def text(self) -> dict[str, Any]:
        """What it says of the language model; one that also sees has it inside."""
        inner: dict[str, Any] = self.config.get("text_config", self.config)
        return inner


LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA = (
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")
)
GPT_OSS, LLAMA_4 = "GptOssForCausalLM", "Llama4ForCausalLM"
V2, V3, V32, NEXT = (f"{name}ForCausalLM" for name in ("DeepseekV2", "DeepseekV3", "DeepseekV32", "Qwen3Next"))
PLAIN_ROPE = {"rope_theta": 20000.0, "rope_type": "default"}
LONGROPE = {"rope_theta": 10000.0, "rope_type": "longrope", "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0]}  # fmt: skip
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 4, "beta_slow": 1, "mscale": 0.707}  # fmt: skip
DENSE = {"infer.index_topk": 0}
#: Images of 7 x 7 patches, read by 3 x 3 queries.
QWEN_VL = {
    "hidden_size": 384, "num_attention_heads": 3, "kv_channels": 128, "num_hidden_layers": 2, "visual": {
        "heads": 3, "image_size": 42, "image_start_id": 213, "layers": 2, "mlp_ratio": 2.3, "n_queries": 9,
        "output_dim": 384, "patch_size": 6, "width": 60}}  # fmt: skip

TABLE: dict[str, Row] = {
    "llama with llama3 rope": Row(LLAMA),
    "llama with biases everywhere, tied": Row(
        LLAMA, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE}),
    "llama with linear rope and one KV head": Row(
        LLAMA, {"num_key_value_heads": 1, "rope_parameters": {**PLAIN_ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama with as many KV heads as heads, without head_dim": Row(
        LLAMA, {"num_key_value_heads": ABSENT, "head_dim": ABSENT}),
    "mistral with a window": Row(MISTRAL),
    "mistral without": Row(MISTRAL, {"sliding_window": None, "tie_word_embeddings": True}),
    "mistral with as many KV heads as heads": Row(MISTRAL, {"num_key_value_heads": 3}),
    "qwen2 with windows above layer 1": Row(QWEN2),
    "qwen2 with a window by layer type": Row(
        QWEN2, {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "tie_word_embeddings": False}),
    "qwen2 whose window is switched off": Row(QWEN2, {"use_sliding_window": False, "num_key_value_heads": 1}),
    "qwen3": Row(QWEN3),
    "qwen3 with biases, untied": Row(
        QWEN3, {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 5}),
    "mixtral": Row("MixtralForCausalLM"),
    "mixtral with as many KV heads as heads": Row(
        "MixtralForCausalLM", {"num_key_value_heads": 3, "sliding_window": None}),
    "qwen2 moe": Row("Qwen2MoeForCausalLM"),
    "qwen2 moe renormalised": Row(
        "Qwen2MoeForCausalLM", {"norm_topk_prob": True, "mlp_only_layers": [], "num_key_value_heads": 7}),
    "qwen3 moe": Row("Qwen3MoeForCausalLM"),
    "qwen3 moe with an MLP in every other layer": Row(
        "Qwen3MoeForCausalLM", {"decoder_sparse_step": 2, "num_key_value_heads": 5}),
    "glm 4.5 with groups": Row("Glm4MoeForCausalLM"),
    "glm 4.5 with one group, without head norms": Row(
        "Glm4MoeForCausalLM", {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "num_key_value_heads": 5}),
    "seed-oss": Row("SeedOssForCausalLM"),
    "seed-oss with as many KV heads as heads": Row("SeedOssForCausalLM", {"num_key_value_heads": 6}),
    "gpt-oss": Row(GPT_OSS),
    "gpt-oss without layer types, one KV head": Row(GPT_OSS, {"layer_types": ABSENT, "num_key_value_heads": 1}),
    "gpt-oss with as many KV heads as heads, without biases on them": Row(
        GPT_OSS, {"num_key_value_heads": 6, "attention_bias": False, "swiglu_limit": 0.6}),
    "llama 4": Row(LLAMA_4),
    "llama 4 with two experts a token in every layer, no head norms": Row(
        LLAMA_4, {"interleave_moe_layer_step": 1, "num_experts_per_tok": 2, "use_qk_norm": False,
                  "num_key_value_heads": 1, "attn_temperature_tuning": False}),
    "llama 4 with listed layers, and chunks of blocks": Row(
        LLAMA_4, {"no_rope_layers": [0, 1, 1, 0], "moe_layers": [0, 3], "attention_chunk_size": 32,
                  "num_key_value_heads": 6}),
    "llama 4 that sees": Row("Llama4ForConditionalGeneration"),
    "glm-4": Row("GlmForCausalLM"),
    "glm-4 with as many KV heads as heads": Row(
        "GlmForCausalLM", {"num_key_value_heads": 5, "attention_bias": False, "tie_word_embeddings": True}),
    "glm-4 with norms after blocks": Row("Glm4ForCausalLM"),
    "glm-4 with norms after blocks, as many KV heads as heads": Row("Glm4ForCausalLM", {"num_key_value_heads": 5}),
    "phi": Row("PhiForCausalLM"),
    "phi with one KV head and normalised heads": Row(
        "PhiForCausalLM", {"num_key_value_heads": 1, "qk_layernorm": True, "hidden_act": "relu"}),
    "phi 3 beyond its first context": Row("Phi3ForCausalLM"),
    "phi 3 within its first context": Row("Phi3ForCausalLM", {
        "original_max_position_embeddings": 256, "num_key_value_heads": 6,
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256, "attention_factor": 1.2}}),
    "phi 3 with a window, three quarters rotated, tied": Row("Phi3ForCausalLM", {
        "sliding_window": 12, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5,
        "tie_word_embeddings": True,
        "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.75}}),
    "stablelm": Row("StableLmForCausalLM"),
    "stablelm with the MLP beside attention": Row(
        "StableLmForCausalLM", {"use_parallel_residual": True, "num_key_value_heads": 3, "use_qkv_bias": False}),
    "stablelm with a norm for each head": Row("StableLmForCausalLM", {"qk_layernorm": True}),
    "olmo 2": Row("Olmo2ForCausalLM"),
    "starcoder 2 with a window": Row("Starcoder2ForCausalLM"),
    "starcoder 2 without biases": Row("Starcoder2ForCausalLM", {
        "use_bias": False, "sliding_window": None, "num_key_value_heads": 3, "tie_word_embeddings": False}),
    "command r": Row("CohereForCausalLM"),
    "command r+, which normalises each head": Row(
        "CohereForCausalLM", {"use_qk_norm": True, "num_key_value_heads": 6, "attention_bias": True}),
    "baichuan 2": Row("BaichuanForCausalLM", oracle=Plain(Baichuan)),
    "baichuan 1": Row("BaiChuanForCausalLM", {
        "architectures": ["BaiChuanForCausalLM"], "z_loss_weight": ABSENT, "num_attention_heads": 3},
        oracle=Plain(Baichuan)),
    "baichuan 2 13b, with linear biases": Row("BaichuanForCausalLM", {
        "max_position_embeddings": ABSENT, "hidden_size": 80, "num_attention_heads": 5}, oracle=Plain(Baichuan13B)),
    "baichuan 1 13b": Row("BaichuanForCausalLM", {
        "max_position_embeddings": ABSENT, "z_loss_weight": ABSENT, "num_attention_heads": 4},
        oracle=Plain(Baichuan13B)),
    "mpt, with linear biases": Row("MptForCausalLM"),
    "mpt with a power of two of heads and a scale, untied": Row("MptForCausalLM", {
        "d_model": 64, "n_heads": 4, "tie_word_embeddings": False,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "softmax_scale": 0.4}}),
    "qwen 1": Row("QWenLMHeadModel", oracle=Plain(Qwen)),
    "qwen 1 beyond what it was trained on": Row(
        "QWenLMHeadModel", {"seq_length": 20, "max_position_embeddings": 128}, oracle=Plain(Qwen)),
    "qwen 1 beyond it, half rotated, with other angles alone": Row("QWenLMHeadModel", {
        "seq_length": 33, "max_position_embeddings": 128, "rotary_pct": 0.6, "use_logn_attn": False},
        oracle=Plain(Qwen)),
    "qwen 1 with biases, half rotated": Row(
        "QWenLMHeadModel",
        {"no_bias": False, "rotary_pct": 0.6, "hidden_size": 60, "num_attention_heads": 3, "kv_channels": 20},
        oracle=Plain(Qwen)),
    "qwen-vl, of which this is the text; test_qwen_vl.py has the images": Row(
        "QWenLMHeadModel", QWEN_VL, oracle=Plain(QwenVL), tolerance=2e-4),
    "chatglm": Row("ChatGLMModel", oracle=Plain(ChatGLM)),
    "chatglm with as many KV heads as heads, over a longer context": Row(
        "ChatGLMModel", {"multi_query_group_num": 5, "rope_ratio": 50.0, "add_qkv_bias": False}, oracle=Plain(ChatGLM)),
    "chatglm 2 over a longer context": Row("ChatGLMModel", {
        "_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 4.0}, oracle=Plain(ChatGLM)),
    "chatglm under its other name": Row("ChatGLMForConditionalGeneration", {
        "architectures": ["ChatGLMForConditionalGeneration"]}, oracle=Plain(ChatGLM)),
    "qwen1.5": Row(QWEN2, {"use_sliding_window": False, "tie_word_embeddings": False}),
    "qwq": Row(QWEN2, {"use_sliding_window": False, "tie_word_embeddings": False, "num_key_value_heads": 1,
                       "rms_norm_eps": 1e-5}),
    "yi": Row(LLAMA, {"rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"}}),
    "llama with dynamic rope": Row(
        LLAMA, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}}),
    "gemma": Row("GemmaForCausalLM"),
    "gemma with as many KV heads as heads": Row("GemmaForCausalLM", {"num_key_value_heads": 3}),
    "gemma 2": Row("Gemma2ForCausalLM"),
    "gemma 2 with one KV head": Row("Gemma2ForCausalLM", {"num_key_value_heads": 1}),
    "gemma 3": Row(GEMMA),
    "gemma 3 by pattern with capped logits": Row(
        GEMMA, {"layer_types": ABSENT, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0}),
    "gemma 3 with biases, untied": Row(
        GEMMA, {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 3}),
    "deepseek V2": Row(V2),
    "deepseek V2-Lite, which projects queries directly": Row(V2, {"q_lora_rank": None}),
    "deepseek V2 with one head": Row(V2, {"num_attention_heads": 1, "num_key_value_heads": 1, "q_lora_rank": None}),
    "deepseek V2 with experts chosen from all": Row(V2, {"topk_method": "greedy", "n_shared_experts": 1}),
    "deepseek V2 over a longer context": Row(
        V2, {"qk_rope_head_dim": 16, "rope_parameters": {**YARN, "mscale_all_dim": 0.707}}),
    "deepseek V3": Row(V3),
    "deepseek V3 with one group of experts and one bound of the angles, as Kimi K2 has": Row(
        V3, {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 2.827,
             "qk_rope_head_dim": 16, "rope_parameters": {**YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0,
                                                         "mscale_all_dim": 1.0}}),
    "deepseek V3 over a longer context": Row(
        V3, {"qk_rope_head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    "deepseek V3 with biases and rotated halves": Row(V3, {"attention_bias": True, "rope_interleave": False}),
    "deepseek V3.2": Row(V32),
    "deepseek V3.2 with one group of experts": Row(V32, {"n_group": 1, "topk_group": 1}),
    "deepseek V3.2 that reads as much as there is": Row(V32, {"index_topk": 105}),
    "deepseek V3.2 that reads as much as there is, read densely": Row(V32, {"index_topk": 105}, keys=DENSE),
    "deepseek V3.2 that could read more than there is, read densely": Row(V32, {"index_topk": 200}, keys=DENSE),
    "qwen3-next": Row(NEXT, tolerance=5e-4),
    "qwen3-next with biases, and as many value heads as key heads": Row(
        NEXT, {"attention_bias": True, "linear_num_value_heads": 2}, tolerance=5e-4),
    "qwen3-next by layer type, with a short convolution": Row(
        NEXT, {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
               "linear_conv_kernel_dim": 2, "num_key_value_heads": 3}, tolerance=5e-4),
}  # fmt: skip
