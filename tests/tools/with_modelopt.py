"""Checkpoints by NVIDIA's Model Optimizer. Runs in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from tiny import keep_values, texts, tiny_model, write_all


def quantized(folder: Path, config: dict[str, Any], kind: str = "qwen3") -> None:
    from transformers import AutoModelForCausalLM

    original = tiny_model(folder / "original", kind, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)

    def calibrate(model: Any) -> None:
        for ids in texts():
            model(torch.tensor([ids]))

    mtq.quantize(model, config, calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder / "checkpoint")
    stored, values = load_file(folder / "checkpoint/model.safetensors"), {}
    for name, tensor in stored.items():
        scale, whole = stored.get(f"{name}_scale"), stored.get(f"{name}_scale_2")
        if scale is None:
            continue
        values[name] = dequantized(tensor, scale, whole)
    keep_values(folder, values)


def dequantized(tensor: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    """By the tool's own types."""
    sizes, wide = {-1: 16}, torch.float32
    if whole is not None:
        packed = NVFP4QTensor(torch.Size([tensor.shape[0], 2 * tensor.shape[1]]), wide, tensor)
        return packed.dequantize(wide, scale=scale, double_scale=whole, block_sizes=sizes)
    if scale.dtype == torch.uint8:
        kind, columns = (MXFP8QTensor, 1) if tensor.dtype == torch.float8_e4m3fn else (MXFP4QTensor, 2)
        microscaled = kind(torch.Size([tensor.shape[0], columns * tensor.shape[1]]), wide, tensor)
        return microscaled.dequantize(wide, scale=scale, block_sizes={-1: 32})
    if scale.dim() == 4:
        scale, sizes = scale[:, 0, :, 0], {-1: 128, -2: 128}
        return FP8QTensor(tensor.shape, wide, tensor).dequantize(wide, scale=scale, block_sizes=sizes)
    return FP8QTensor(tensor.shape, wide, tensor).dequantize(wide, scale=scale.reshape(-1, 1))


def case(name: str, kind: str = "qwen3") -> Callable[[Path], None]:
    return lambda folder: quantized(folder, getattr(mtq, name), kind)


# AWQ in NVFP4 needs a card; INT4_AWQ and INT8 are not read.
CASES = {
    "fp8": case("FP8_DEFAULT_CFG"),
    "nvfp4": case("NVFP4_DEFAULT_CFG"),
    "nvfp4-biases": case("NVFP4_DEFAULT_CFG", "qwen2"),
    "nvfp4-weights": case("W4A16_NVFP4_CFG"),
    "nvfp4-mlp": case("NVFP4_MLP_ONLY_CFG"),
    "fp8-rows": case("FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "fp8-blocks": case("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "mxfp8": case("MXFP8_DEFAULT_CFG"),
    "mxfp4": case("MXFP4_DEFAULT_CFG"),
}

if __name__ == "__main__":
    write_all(modelopt.__version__, CASES)
