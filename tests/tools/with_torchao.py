"""Checkpoints by torchao, through transformers. Runs in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao
from tiny import keep_values, tiny_model, write_all
from torchao import quantization
from torchao.quantization import PerGroup, PerRow, PerTensor, quant_api

# Products in float8 need a card; weights are quantized without one.
quant_api._check_hardware_support = lambda granularity: None


def quantized(folder: Path, config: Any, kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> None:
    from transformers import AutoModelForCausalLM, TorchAoConfig

    original = tiny_model(folder / "original", kind, dtype)
    settings = TorchAoConfig(quant_type=config)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=dtype, quantization_config=settings, device_map="cpu")
    model.save_pretrained(folder / "checkpoint")
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module.weight.data) is not torch.Tensor:
            weight, wide = module.weight.detach(), torch.float32  # or it multiplies in bfloat16
            intx = isinstance(weight, quantization.IntxUnpackedToInt8Tensor)
            values[f"{name}.weight"] = weight.to(wide).dequantize() if intx else weight.dequantize(wide)
    keep_values(folder, values)


def case(name: str, **settings: Any) -> Callable[[Path], None]:
    return lambda folder: quantized(folder, getattr(quantization, name)(**settings))


CASES = {
    "int8-weights": case("Int8WeightOnlyConfig"),
    "int8-weights-groups": case("Int8WeightOnlyConfig", granularity=PerGroup(64)),
    "int8-dynamic": case("Int8DynamicActivationInt8WeightConfig"),
    "float8-weights": case("Float8WeightOnlyConfig"),
    "float8-dynamic-rows": case("Float8DynamicActivationFloat8WeightConfig", granularity=PerRow()),
    "float8-dynamic-tensor": case("Float8DynamicActivationFloat8WeightConfig", granularity=PerTensor()),
    "intx-4-weights": case("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32)),
    "intx-3-weights": case("IntxWeightOnlyConfig", weight_dtype=torch.int3, granularity=PerGroup(64)),
    "intx-4-dynamic": case("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4,
                           weight_granularity=PerGroup(32)),
}  # fmt: skip

if __name__ == "__main__":
    write_all(torchao.__version__, CASES)
