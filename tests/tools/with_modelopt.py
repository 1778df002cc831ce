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
        if tensor.dtype == torch.int8 or (scale.dtype == torch.float32 and tensor.dtype == torch.uint8):
            values[name] = integers(tensor, scale, stored.get(f"{name.removesuffix('weight')}pre_quant_scale"))
            assert_near(values[name], load_file(original / "model.safetensors")[name].float(), name)
        else:
            values[name] = dequantized(tensor, scale, whole)
    keep_values(folder, values)


def integers(tensor: torch.Tensor, scale: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """The tool has no reader for these; so as TensorRT-LLM multiplies them: activations by ``pre_quant_scale`` first,
    and the scales of four bits in the model's dtype. With factors evener dequantizes, and keeps those scales exact."""
    if tensor.dtype == torch.int8:
        values = tensor.float() * scale.reshape(-1, 1)
    else:
        signed = tensor.view(torch.int8).int()
        rows = torch.stack(((signed << 28) >> 28, signed >> 4), dim=1).flatten(0, 1).float()
        own = scale.bfloat16().float() if columns is None else scale
        values = rows * own.repeat_interleave(rows.shape[1] // own.shape[1], 1)
    return values if columns is None else values * columns.float()


def assert_near(values: torch.Tensor, original: torch.Tensor, name: str) -> None:
    """Numbers in a wrong order have no correlation. It is below one because numbers were rounded, and because AWQ moved
    factors near one into norms."""
    found = float(torch.corrcoef(torch.stack((values.flatten(), original.flatten())))[0, 1])
    assert found > 0.97, f"{name} has a correlation of {found:.3f} with the original"


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


# AWQ in NVFP4 needs a card.
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
    "int4-weights": case("INT4_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "int4-awq": case("INT4_AWQ_CFG"),
    "int4-awq-biases": case("INT4_AWQ_CFG", "qwen2"),
    "int8-smooth": case("INT8_SMOOTHQUANT_CFG"),
    "int8": case("INT8_DEFAULT_CFG"),
    "int8-weights": case("INT8_WEIGHT_ONLY_CFG"),
    "int4-fp8-awq": case("W4A8_AWQ_BETA_CFG"),
}

if __name__ == "__main__":
    write_all(modelopt.__version__, CASES)
