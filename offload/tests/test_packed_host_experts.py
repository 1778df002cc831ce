"""Experts on the host in the formats of published checkpoints: they stay packed there, whatever the device reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import FEW_BLOCKS
from family_oracles import make_transformers
from gguf_experts import write_experts
from gguf_files import q4_k_m
from gguf_gpt_oss import write_gpt_oss
from harsh_traffic import LIMITS, assert_same, shrink, traffic
from integer_files import awq_tensors, compressed_tensors
from integer_files import quantized as four_bits
from safetensors.torch import load_file, save_file

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener_conformance.naive.model import find_architecture
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
WIDTHS = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**HEADS, **WIDTHS, "num_experts": 8, "vocab_size": 259},
    "Mixtral": {**HEADS, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 6,
                "sliding_window": None, "vocab_size": 259},
    "DeepseekV3": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
                   "first_k_dense_replace": 1, "intermediate_size": 256, "kv_lora_rank": 256, "q_lora_rank": 256,
                   "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 259},
    "GptOss": {**HEADS, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 6,
               "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
#: Numbers of all routed experts, and how many layers have some.
NUMBERS = {"Qwen3Moe": (2 * 8 * 3 * 256**2, 2), "Mixtral": (2 * 6 * 3 * 256**2, 2),
           "DeepseekV3": (8 * 3 * 256**2, 1), "GptOss": (2 * 6 * 3 * 256**2, 2)}  # fmt: skip


def made(family: str, folder: Path) -> Path:
    make_transformers({**find_architecture(f"{family}ForCausalLM").tiny_config(), **MODELS[family]}, folder)
    return folder


def q4_k_m_file(family: str, folder: Path) -> Path:
    return write_experts(made(family, folder), folder / "m.gguf", q4_k_m)


def q4_k_m_experts(family: str, folder: Path) -> Path:
    """The rest has the same numbers on either device: rounded otherwise, it chooses other experts somewhere."""

    def kind(name: str) -> str:
        return q4_k_m(name) if "_exps" in name else "F32"

    return write_experts(made(family, folder), folder / "m.gguf", kind)


def mxfp4_experts(family: str, folder: Path) -> Path:
    def kind(name: str) -> str:
        return "MXFP4" if "_exps" in name else "F32"

    return write_experts(made(family, folder), folder / "m.gguf", kind)


def fp8_folder(family: str, folder: Path) -> Path:
    """Experts in FP8 with a scale for each block of 128 × 128, as DeepSeek V3 is published."""
    tensors = load_file(made(family, folder) / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        blocks = tensors[name].unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-9) / 448
        stored = (blocks / scale[:, None, :, None]).reshape(tensors[name].shape)
        tensors |= {name: stored.contiguous().to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    return quantized(folder, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def mxfp4_folder(family: str, folder: Path) -> Path:
    """Experts in MXFP4, as gpt-oss is published."""
    tensors, noise = load_file(made(family, folder) / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        size = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=noise, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 124, size, generator=noise, dtype=torch.uint8)
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    return quantized(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": modules})


def mxfp4_file(family: str, folder: Path) -> Path:
    """The same in a file."""
    return write_gpt_oss(mxfp4_folder(family, folder), folder / "m.gguf")


def awq_folder(family: str, folder: Path) -> Path:
    """Experts in four bits as AutoAWQ stores them, in groups of 128."""
    tensors = load_file(made(family, folder) / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        integers = four_bits(4, *tensors.pop(name).shape, 128, seed=len(name))
        tensors |= awq_tensors(name.removesuffix(".weight"), integers)
    return quantized(folder, tensors, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"})


def w4afp8_folder(family: str, folder: Path) -> Path:
    """Experts in four bits whose activations are rounded to FP8."""
    tensors = load_file(made(family, folder) / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        integers = four_bits(4, *tensors.pop(name).shape, 32, symmetric=True, scale=torch.bfloat16, seed=len(name))
        tensors |= compressed_tensors(name, integers, 4, True, False)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    how = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": how}}
    return quantized(folder, tensors, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
    })  # fmt: skip


def quantized(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": config}))
    return folder


@pytest.mark.parametrize(
    ("family", "write", "least", "most"),
    [
        # A file and folders whose experts are one tensor each or all in one, with rounded activations or not.
        ("GptOss", mxfp4_folder, 4.25, 4.5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("Mixtral", q4_k_m_file, 4.5, 5.4),
            ("DeepseekV3", w4afp8_folder, 4.5, 4.9),
            ("Qwen3Moe", q4_k_m_file, 4.5, 5.4), ("DeepseekV3", fp8_folder, 8, 8.1),
            ("DeepseekV3", q4_k_m_experts, 4.5, 4.7), ("Qwen3Moe", mxfp4_experts, 4.25, 4.5),
            ("GptOss", mxfp4_file, 4.25, 4.5), ("Mixtral", awq_folder, 4.1, 4.9),
        )),
    ],
)  # fmt: skip
def test_experts_of_a_quantized_checkpoint_stay_packed_on_the_host(
    tmp_path: Path, family: str, write: Callable[[str, Path], Path], least: float, most: float
) -> None:
    """``least`` and ``most``: bits of a number. With chunks, preemption, prefix hits and aborts together."""
    model, (numbers, layers) = write(family, tmp_path), NUMBERS[family]
    keys = {**LIMITS, "dtype": "float32", "infer.threads": 1}
    on_cpu = from_overrides(model, {**keys, "backend": "cpu", "infer.block_size": 128})
    want = play(build_controller(on_cpu)[0], **traffic())
    chip = {**keys, "backend": "simulated", "infer.cpu_layer_num": layers, "offload.stream_prompts": "off"}
    controller, ready = build_controller(from_overrides(model, chip))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    assert controller.scheduler.stats.preemptions
    memory = ready.info.memory
    assert memory.measured_host == memory.host and memory.measured_weights == memory.weights
    assert least <= 8 * memory.host / numbers <= most
    assert not any("experts" in line for line in ready.info.manifest.dequantized)
    every = explain(from_overrides(model, {**chip, "infer.cpu_layer_num": 0}))
    assert every["memory"]["weights"] - memory.weights >= 4 * numbers, "the chip has them in float32"
