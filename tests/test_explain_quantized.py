"""``evener explain`` of quantized models that people download, from their configs and headers: the weights that a file
would hold, of the right shapes, without a byte of them. Configs are written from public facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from evener.config import from_overrides
from evener.contracts.declared import LinearWeight, StackedWeight, Weight
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener_conformance.naive.model import find_architecture
from evener_inspection.explanation import explain

Headers = dict[str, tuple[str, tuple[int, ...]]]
Store = Callable[[str, int, int], Headers]
BYTES = {"I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float16",
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
       "modules_to_not_convert": None}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "true_sequential": True,
        "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.2.0"]}, "damp_percent": 0.01}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
#: DeepSeek V3.1: scales are powers of two.
UE8M0 = {**FP8, "scale_fmt": "ue8m0"}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
    "rope_theta": 50000.0, "max_position_embeddings": 131072, "num_nextn_predict_layers": 0, "ep_size": 1,
    "aux_loss_alpha": 0.001, "seq_aux": True, "attention_dropout": 0.0, "initializer_range": 0.02, "pretraining_tp": 1,
    "bos_token_id": 163584, "eos_token_id": 163585, "use_cache": True, "transformers_version": "4.48.3",
    "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config",
                 "AutoModel": "modeling_deepseek.DeepseekV3Model",
                 "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
}  # fmt: skip
#: Kimi K2 Thinking: the experts in four bits, everything else plain.
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None,
        "dynamic": False}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip


def awq(name: str, rows: int, columns: int) -> Headers:
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.qweight": ("I32", (columns, rows // 8)), f"{stem}.qzeros": ("I32", (columns // 128, rows // 8)),
        f"{stem}.scales": ("F16", (columns // 128, rows)),
    }  # fmt: skip


def gptq(name: str, rows: int, columns: int) -> Headers:
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.qweight": ("I32", (columns // 8, rows)), f"{stem}.qzeros": ("I32", (columns // 128, rows // 8)),
        f"{stem}.scales": ("F16", (columns // 128, rows)), f"{stem}.g_idx": ("I32", (columns,)),
    }  # fmt: skip


def fp8(name: str, rows: int, columns: int) -> Headers:
    return {name: ("F8_E4M3", (rows, columns)), f"{name}_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128)))}


def powers_of_two(name: str, rows: int, columns: int) -> Headers:
    """Scales of one byte each, as later files have them; those of V3.1 itself are float32 numbers."""
    return {**fp8(name, rows, columns), f"{name}_scale_inv": ("F8_E8M0", (-(-rows // 128), -(-columns // 128)))}


def packed(name: str, rows: int, columns: int) -> Headers:
    if ".experts." not in name:
        return {name: ("BF16", (rows, columns))}
    return {
        f"{name}_packed": ("I32", (rows, columns // 8)), f"{name}_scale": ("BF16", (rows, columns // 32)),
        f"{name}_shape": ("I64", (2,)),
    }  # fmt: skip


def headers_of(config: Mapping[str, Any], store: Store) -> Headers:
    """What a checkpoint of the model holds; its matrices are those that the architecture declares, stored by ``store``;
    routers, the embedding and the head are plain."""
    build = Builder("bfloat16", 4096)
    find_architecture(config["architectures"][0])(config, build)
    found: Headers = {}
    for item in build.weights:
        if isinstance(item, StackedWeight):
            for part in item.parts:
                for expert in range(item.experts):
                    found |= store(part.name.format(expert), part.rows, part.columns)
        elif isinstance(item, LinearWeight):
            for part in item.parts:
                plain = part.name.endswith(("lm_head.weight", "mlp.gate.weight"))
                found |= {part.name: ("BF16", (part.rows, part.columns))} if plain else store(
                    part.name, part.rows, part.columns)  # fmt: skip
        elif isinstance(item, Weight):
            for name, shape in zip(item.sources, item.shapes or (item.shape,) * len(item.sources), strict=True):
                found |= store(name, *shape) if len(shape) == 2 and "embed" not in name else {name: ("BF16", shape)}
    return found


def write(folder: Path, config: Mapping[str, Any], quantization: Mapping[str, Any], store: Store) -> Path:
    """A model folder whose file has a header, and a hole in place of the weights."""
    at, entries = 0, {}
    for name, (kind, shape) in headers_of(config, store).items():
        size = prod(shape) * BYTES[kind]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def explained(folder: Path, **keys: Any) -> Mapping[str, Any]:
    more = {"dtype": "bfloat16", "backend": "cpu", "infer.kv_memory": "64MiB", "infer.max_seq_len": 4096}
    return explain(from_overrides(str(folder), {**more, **keys}))


def held(found: Mapping[str, Any]) -> int:
    """Bytes of the weights, in memory and mapped."""
    return int(found["memory"]["weights"] + found["memory"]["mapped"])


@pytest.mark.parametrize(("quantization", "store"), [(AWQ, awq), (GPTQ, gptq)], ids=["AWQ", "GPTQ"])
def test_qwen3_8b_of_four_bits_stays_packed_on_the_cpu(
    quantization: Mapping[str, Any], store: Store, tmp_path: Path
) -> None:
    folder = write(tmp_path, QWEN3_8B, quantization, store)
    found = explained(folder)
    assert found["packings"]["cpu.blocks"] == 36 * 4 and not found["dequantized"]
    numbers = 36 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 12288)
    plain = 2 * 151936 * 4096 * 2
    codes = 151936 * 4096 / 2  # of the head, beside it
    assert numbers * 4.5 / 8 + plain < held(found) < numbers * 4.8 / 8 + plain * 1.01 + codes


def eight_bits(config: Mapping[str, Any], tp: int, ep: int = 1) -> tuple[int, int]:
    """Bytes that the first of ``tp`` ranks holds of a model in FP8 blocks, from its config alone: of all quantized
    weights and their float32 scales, and of embedding and head in bfloat16."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] // tp
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, query, dense = config["kv_lora_rank"], config["q_lora_rank"], config["first_k_dense_replace"]
    attention = [(query, hidden), (heads * (nope + rope), query), (latent + rope, hidden),
                 (heads * (nope + value), latent), (hidden, heads * value)]  # fmt: skip
    layers = config["num_hidden_layers"]

    def mlp(inner: int) -> list[tuple[int, int]]:
        return [(inner, hidden), (inner, hidden), (hidden, inner)]

    width, experts = config["moe_intermediate_size"], config["n_routed_experts"] // ep
    one = {"attention": attention, "dense": mlp(config["intermediate_size"] // tp), "expert": mlp(width * ep // tp),
           "shared": mlp(width * config["n_shared_experts"] // tp)}  # fmt: skip
    counts = {"attention": layers, "dense": dense, "expert": (layers - dense) * experts, "shared": layers - dense}
    nbytes = {
        name: sum(rows * columns + -(-rows // 128) * -(-columns // 128) * 4 for rows, columns in matrices)
        for name, matrices in one.items()
    }
    return sum(counts[name] * nbytes[name] for name in one), 2 * config["vocab_size"] // tp * hidden * 2


@pytest.mark.parametrize(
    ("config", "quantization", "store", "tp", "ep"),
    [
        pytest.param(KIMI_K2, FP8, fp8, 16, 16, id="Kimi K2, 16 ranks with their own experts"),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in {
            "Kimi K2": (KIMI_K2, FP8, fp8, 1, 1), "Kimi K2, 16 ranks": (KIMI_K2, FP8, fp8, 16, 1),
            "DeepSeek V3": (DEEPSEEK_V3, FP8, fp8, 1, 1), "DeepSeek V3, 8 ranks": (DEEPSEEK_V3, FP8, fp8, 8, 1),
            "DeepSeek V3.1, 8 ranks with their own experts": (DEEPSEEK_V3, UE8M0, fp8, 8, 8),
            "DeepSeek V3.1 with scales of a byte": (DEEPSEEK_V3, UE8M0, powers_of_two, 16, 1)}.items()),
    ],
)  # fmt: skip
def test_deepseek_v3_and_kimi_k2_of_eight_bits_stay_as_stored_on_every_rank(
    config: Mapping[str, Any], quantization: Mapping[str, Any], store: Store, tp: int, ep: int, tmp_path: Path
) -> None:
    found = explained(write(tmp_path, config, quantization, store), **{"infer.tp_size": tp, "infer.ep_size": ep})
    assert not found["dequantized"] and found["model"]["problem"] is None
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    sparse = layers - config["first_k_dense_replace"]
    # Of each layer: four of attention, whose down-projections are joined, and two of the MLP; two of shared experts.
    assert found["packings"]["cpu.stored"] == layers * 6 + sparse * 2
    quantized, plain = eight_bits(config, tp, ep)
    routers = sparse * config["n_routed_experts"] * hidden * 2
    codes = config["vocab_size"] * hidden // 2 if "cpu.screened" in found["packings"] else 0  # of the head, beside it
    rest = held(found) - found["memory"]["copies"] - quantized - plain - codes
    assert routers < rest < routers * 1.03  # norms and tables


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [(32, 4, r"2048 inner features of shared experts in units of 128 are too few for so many ranks; sizes that fit"),
     (64, 64, r"q_b_proj.weight is stored in units of 128 and cannot be cut; sizes that fit: 1, 2, 4, 8, 16, 32$")],
)  # fmt: skip
def test_more_ranks_than_the_blocks_allow_are_refused(tp: int, ep: int, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, KIMI_K2 | {"num_hidden_layers": 2}, FP8, fp8)
    with pytest.raises(ConfigError, match=message):
        explained(folder, **{"infer.tp_size": tp, "infer.ep_size": ep})


@pytest.mark.slow
def test_kimi_k2_thinking_of_four_bit_experts_stays_packed_on_the_cpu(tmp_path: Path) -> None:
    found = explained(write(tmp_path, KIMI_K2, PACKED, packed))
    experts = 60 * 384 * 3 * 2048 * 7168
    assert found["packings"]["cpu.blocks"] == 60 * 2 and not found["dequantized"]
    assert experts * 4.5 / 8 < held(found) < experts * 4.8 / 8 + 30e9
