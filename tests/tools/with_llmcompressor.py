"""Checkpoints by llm-compressor: each of its presets. Runs in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llmcompressor
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from tiny import keep_values, texts, tiny_model, write_all

# Or it multiplies in bfloat16.
nvfp4.unpack_fp4_from_uint8 = partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)


def quantized(folder: Path, recipe: Any) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    original = tiny_model(folder / "original", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    ids = texts()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]})
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(ids), max_seq_length=128)
    schemes = {name: module.quantization_scheme for name, module in model.named_modules()
               if getattr(module, "quantization_scheme", None) is not None}  # fmt: skip
    model.save_pretrained(folder / "checkpoint", save_compressed=True)
    stored, values = load_file(folder / "checkpoint/model.safetensors"), {}
    for name, scheme in schemes.items():
        beside = {
            each.removeprefix(f"{name}."): tensor for each, tensor in stored.items() if each.startswith(f"{name}.")
        }
        if scheme.weights is None or not any(each.startswith("weight") for each in beside):
            continue
        wide = {end: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for end, tensor in beside.items()}
        compressor = BaseCompressor.load_from_registry(str(getattr(scheme.format, "value", scheme.format)))
        values[f"{name}.weight"] = compressor.decompress(wide, scheme)["weight"].float()
    keep_values(folder, values)


def preset(name: str) -> Callable[[Path], None]:
    return lambda folder: quantized(folder, QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"]))


CASES = {name: preset(name) for name in PRESET_SCHEMES if name != "UNQUANTIZED"} | {
    "GPTQ-W4A16": lambda folder: quantized(
        folder, GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], actorder="static")
    ),
    "GPTQ-W4A16_ASYM": lambda folder: quantized(
        folder, GPTQModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"])
    ),
}

if __name__ == "__main__":
    write_all(llmcompressor.__version__, CASES)
