"""Checkpoints in the formats of GPTQ, AWQ and FP8 by GPTQModel. Runs in its own environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import keep_values, texts, tiny_model, write_all

# With the one worker that it takes on two cores, its pool for loading raises ValueError (7.7.0).
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import gptqmodel
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FP8Config
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm


def quantized(folder: Path, kind: str = "qwen3", config: Any = QuantizeConfig, **settings: Any) -> None:
    original = tiny_model(folder / "original", kind)
    model = GPTQModel.load(str(original), config(**settings), device="cpu")
    calibration = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts()]
    model.quantize(None if config is FP8Config else calibration, batch_size=1)
    model.save(str(folder / "checkpoint"))
    backend, dtype = (BACKEND.AUTO, torch.float32) if config is FP8Config else (BACKEND.TORCH, torch.float16)
    read = GPTQModel.load(str(folder / "checkpoint"), device="cpu", backend=backend, dtype=dtype)
    values = {}
    for name, module in read.model.named_modules():
        if hasattr(module, "weight_scale_inv"):
            values[f"{name}.weight"] = module.dequantize_weight(dtype=torch.float32).T.clone()
        elif hasattr(module, "qweight"):
            module.scales = module.scales.float()  # or it multiplies in half precision
            values[f"{name}.weight"] = dequantized(module).T.clone()
    keep_values(folder, values)


def dequantized(module: Any) -> torch.Tensor:
    """The weight [columns, rows] of a layer."""
    with torch.inference_mode():
        if hasattr(module, "dequantize_weight"):
            return module.dequantize_weight()
        group = module.group_size if module.group_size > 0 else module.in_features
        return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, group)


def case(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: quantized(folder, **settings)


# It does not write the layouts of AWQ for cards without one: gemv, gemv_fast and llm-awq.
CASES = {
    "gptq-4": case(bits=4, group_size=128),
    "gptq-4-act-order": case(bits=4, group_size=128, desc_act=True),
    "gptq-4-asymmetric": case(bits=4, group_size=32, sym=False),
    "gptq-4-asymmetric-v2": case(bits=4, group_size=32, sym=False, format="gptq_v2"),
    "gptq-4-rows-biases": case(kind="qwen2", bits=4, group_size=-1, act_group_aware=False),
    "gptq-8": case(bits=8, group_size=32),
    "gptq-8-act-order-v2": case(bits=8, group_size=128, desc_act=True, format="gptq_v2"),
    "gptq-3": case(bits=3, group_size=128),
    "gptq-3-asymmetric": case(bits=3, group_size=32, sym=False),
    "gptq-2": case(bits=2, group_size=32),
    "gptq-2-act-order-v2": case(bits=2, group_size=32, desc_act=True, format="gptq_v2"),
    "gptq-5": case(bits=5, group_size=128),
    "gptq-6-act-order": case(bits=6, group_size=32, desc_act=True),
    "gptq-7-asymmetric": case(bits=7, group_size=64, sym=False),
    "gptq-3-planes": case(bits=3, group_size=32, format="gptq_p"),
    "gptq-rules": case(bits=4, group_size=128, dynamic={
        r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, r"-:.*\.k_proj": {},
    }),
    "fp8-rows": case(config=FP8Config, format="float8_e4m3fn", weight_scale_method="row"),
    "fp8-blocks": case(
        config=FP8Config, format="float8_e4m3fn", weight_scale_method="block", weight_block_size=[128, 128]
    ),
    "fp8-tensor": case(config=FP8Config, format="float8_e5m2", weight_scale_method="tensor"),
    "awq-gemm": case(bits=4, group_size=128, quant_method="awq", format="gemm"),
}  # fmt: skip

if __name__ == "__main__":
    write_all(gptqmodel.__version__, CASES)
