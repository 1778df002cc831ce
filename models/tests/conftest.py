"""Tiny random models, made by transformers and saved as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch

TinyModel = Callable[..., tuple[Any, Path]]


def _randomise(model: Any) -> None:
    """Weights large enough that norms, biases, windows and caps all show in the logits."""
    generator = torch.Generator().manual_seed(7)
    offset = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("norm.weight"):
                parameter.copy_(offset + 0.2 * noise)
            else:
                parameter.copy_((0.1 if parameter.dim() == 1 else 0.25) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


@pytest.fixture
def tiny_model(tmp_path: Path) -> TinyModel:
    """``tiny_model(config, **save options)``: transformers' model in fp32, and the folder that it was saved in."""

    def make(config: dict[str, Any], **options: Any) -> tuple[Any, Path]:
        from transformers import AutoConfig, AutoModelForCausalLM

        made = AutoConfig.for_model(**config)
        made._experts_implementation = "eager"  # the grouped one wants sizes that are multiples of 16 bytes
        model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
        _randomise(model)
        model.save_pretrained(tmp_path, **options)
        return model, tmp_path

    return make


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``write_gguf(family, keys, tensors, kind)``: a GGUF file."""

    def write(*arguments: Any, name: str = "m.gguf", **more: Any) -> Path:
        return gguf_files.write_gguf(tmp_path / name, *arguments, **more)

    return write
