"""Checkpoints by AutoAWQ. Runs in its own environment."""

from __future__ import annotations

from pathlib import Path

import awq
from awq import AutoAWQForCausalLM
from awq.modules.linear import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from tiny import keep_values, texts, tiny_model, write_all


def quantized(folder: Path, kind: str, group: int, version: str = "GEMM") -> None:
    from transformers import PreTrainedTokenizerFast

    original = tiny_model(folder / "original", kind)
    model = AutoAWQForCausalLM.from_pretrained(str(original), device_map="cpu", safetensors=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(original)
    words = [" ".join(f"w{i}" for i in ids) for ids in texts()]
    config = {"zero_point": True, "q_group_size": group, "w_bit": 4, "version": version}
    model.quantize(tokenizer, quant_config=config, calib_data=words, max_calib_seq_len=128)
    model.save_quantized(str(folder / "checkpoint"))
    values = {}
    for name, module in model.model.named_modules():
        if isinstance(module, WQLinear_GEMM):
            scales = module.scales.float()
            weight = dequantize_gemm(module.qweight, module.qzeros, scales, module.w_bit, module.group_size)
            values[f"{name}.weight"] = weight.T
    keep_values(folder, values)


CASES = {
    "gemm-128": lambda folder: quantized(folder, "qwen3", 128),
    "gemm-32-biases": lambda folder: quantized(folder, "qwen2", 32),
    "gemm-llama": lambda folder: quantized(folder, "llama", 64),
}

if __name__ == "__main__":
    write_all(awq.__version__, CASES)
