"""Checkpoints by bitsandbytes, through transformers. Runs in its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from tiny import keep_values, tiny_model, write_all


def quantized(folder: Path, kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    original = tiny_model(folder / "original", kind, dtype)
    config = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=dtype, quantization_config=config, device_map="cpu")
    model.save_pretrained(folder / "checkpoint")
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            state.dtype = torch.float32
            values[f"{name}.weight"] = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weight = module.weight
            scale = weight.SCB if weight.SCB is not None else module.state.SCB
            values[f"{name}.weight"] = bitsandbytes.functional.int8_vectorwise_dequant(weight.data, scale)
    keep_values(folder, values)


CASES = {
    "nf4": lambda folder: quantized(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": lambda folder: quantized(folder, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "nf4-nested": lambda folder: quantized(
        folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4-nested-biases": lambda folder: quantized(
        folder, "qwen2", torch.float16, load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True
    ),
    "int8": lambda folder: quantized(folder, load_in_8bit=True),
}  # fmt: skip

if __name__ == "__main__":
    write_all(bitsandbytes.__version__, CASES)
