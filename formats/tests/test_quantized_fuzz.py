"""Mutated configs, headers and numbers of quantized weights: read, or refused with what to do; no other exception."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.contracts.quant import QuantScheme
from evener.errors import CheckpointError
from evener_conformance.kit.formats import HeldCheckpoint
from evener_formats.plugin import evener_quant_schemes

NAME = "layers.0.example.weight"
ODD: tuple[Any, ...] = (
    0, -1, 1, 3, 7, 33, 2**31, 2**63, 1.5, "4", "", None, True, [], {}, [1], {"a": 1}, "marlin", "re:(",
)  # fmt: skip
NAMES = ("gptq", "awq", "halves", "compressed-tensors", "modelopt", "w4afp8", "bitsandbytes", "torchao", "modelslim")
SCHEMES = [scheme for scheme in evener_quant_schemes() if scheme.name in NAMES]
DTYPES = ("int32", "int64", "uint8", "int8", "float16", "float32", "bfloat16", "float8_e4m3fn")


def changed(settings: Any, draw: random.Random) -> Any:
    """The settings with one value, at any depth, replaced or left out."""
    if not isinstance(settings, Mapping) or not settings:
        return draw.choice(ODD)
    key = draw.choice(sorted(settings))
    if draw.random() < 0.2:
        return {k: v for k, v in settings.items() if k != key}
    return {**settings, key: changed(settings[key], draw) if draw.random() < 0.5 else draw.choice(ODD)}


def mutate(stored: Mapping[str, torch.Tensor], draw: random.Random) -> dict[str, torch.Tensor]:
    """One tensor with another shape, dtype or number, or without it."""
    tensors = dict(stored)
    name = draw.choice(sorted(tensors))
    tensor, how = tensors[name], draw.randrange(6)
    if how == 0:
        del tensors[name]
    elif how == 1 and tensor.dim():
        tensors[name] = tensor.narrow(draw.randrange(tensor.dim()), 0, 1)
    elif how == 2:
        tensors[name] = tensor[None] if draw.random() < 0.5 else tensor.flatten()
    elif how == 3:
        tensors[name] = torch.zeros(tensor.shape, dtype=getattr(torch, draw.choice(DTYPES)))
    elif how == 4 and tensor.numel() and not tensor.is_floating_point():
        wide = tensor.clone()
        wide.view(-1)[draw.randrange(wide.numel())] = draw.choice((0, 1, 7, torch.iinfo(tensor.dtype).max))
        tensors[name] = wide
    elif tensor.dim() == 2:
        tensors[name] = tensor.T.contiguous()
    return tensors


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda each: str(each.name))
def test_mutated_weights_are_read_or_refused(scheme: QuantScheme) -> None:
    draw, read, refused = random.Random(7), 0, 0
    for config, _, stored in list(scheme.examples(NAME, 3)):
        method = config["quantization_config"].get("quant_method", scheme.name)
        for _ in range(60):
            settings = dict(config)
            tensors = dict(stored)
            if draw.random() < 0.5:
                tensors = mutate(stored, draw)
            else:
                odd = changed(config["quantization_config"], draw)
                settings["quantization_config"] = {**odd, "quant_method": method}
            headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            try:
                if not scheme.detect(settings):
                    continue
                ready = scheme.configured(settings, HeldCheckpoint(settings, headers, tensors))
                part, roles = ready.part(NAME, headers), ready.tensors(NAME, headers)
                if part is None or not set(roles.values()) <= set(tensors):
                    continue
                part = replace(part, tensors={role: tensors[stored_name] for role, stored_name in roles.items()})
                ready.arrange(part)
                shape = ready.dequantize(part, "float32").shape
                # A plain tensor may also be a vector or a stack, which the loader compares with the model.
                assert part.format.plain or shape == (part.rows, part.columns)
                read += 1
            except CheckpointError as error:
                assert len(str(error)) > 40
                refused += 1
    assert read > 20 < refused
