"""Mutated configs, headers and numbers of quantized weights: read, or refused with what to do; no other exception.
What is read is also cut for a rank, or that is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import BLOCKS, QuantScheme
from evener.errors import CheckpointError
from evener_conformance.kit.formats import HeldCheckpoint
from evener_formats.plugin import evener_quant_schemes

NAME = "layers.0.example.weight"
ODD: tuple[Any, ...] = (
    0, -1, 1, 3, 7, 33, 2**31, 2**63, 1.5, "4", "", None, True, [], {}, [1], {"a": 1}, "marlin", "re:(",
)  # fmt: skip
#: What configs say beside what the schemes' examples do.
MORE: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"fmt": "e4m3", "activation_scheme": "static", "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
            "modules_to_not_convert": ["lm_head"]},
    "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip
DTYPES = ("int32", "int64", "uint8", "int8", "float16", "float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu")


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


def in_a_folder(headers: Headers, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names of a folder of safetensors files, which knows no blocks: there they are bytes."""
    return {f"{name}.{headers[name][0]}" if headers[name][0] in BLOCKS else name: t for name, t in tensors.items()}


# A scheme that is added is tested here too.
@pytest.mark.parametrize("scheme", evener_quant_schemes(), ids=lambda each: str(each.name))
def test_mutated_weights_are_read_or_refused(scheme: QuantScheme) -> None:
    draw, read, refused = random.Random(7), 0, 0
    examples = list(scheme.examples(NAME, 3))
    for config, known, tensors_of_example in examples:
        stored = in_a_folder(known, tensors_of_example)
        given = {**config["quantization_config"], **MORE.get(scheme.name, {})}
        method = given.get("quant_method", scheme.name)
        for _ in range(max(60, 300 // len(examples))):
            settings = {**config, "quantization_config": given}
            tensors = dict(stored)
            if draw.random() < 0.5:
                tensors = mutate(stored, draw)
            else:
                odd = changed(given, draw)
                settings["quantization_config"] = {**odd, "quant_method": method}
            headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            try:
                if not scheme.detect(settings):
                    continue
                ready = scheme.configured(settings, HeldCheckpoint(settings, headers, tensors))
                part, roles = ready.part(NAME, headers), ready.tensors(NAME, headers)
                if part is None or not set(roles.values()) <= set(tensors):
                    continue
                # Of a stack, the first matrix, as the loader takes one after another.
                found = {role: tensors[each][0] if part.format.stack else tensors[each] for role, each in roles.items()}
                part = replace(part, tensors=found)
                list(ready.numbers(part))  # as the loader does, before it arranges
                ready.arrange(part)
                shape = ready.dequantize(part, "float32").shape
                # The loader compares vectors and stacks with what the model declares (``evener.loading.match``).
                assert part.format.plain or shape == (part.rows, part.columns)
                read += 1
                if not part.format.plain:
                    half = -(-part.rows // 2)
                    assert ready.dequantize(ready.cut(part, "out", 0, half), "float32").shape == (half, part.columns)
            except CheckpointError as error:
                assert len(str(error)) > 40
                refused += 1
    assert read > 20 < refused
