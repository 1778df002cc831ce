"""Generators of test cases for the built-in ops. An op of another package names its own in ``OpSchema.cases``.

A generator takes ``(dtype, torch.Generator)`` and yields ``OpCase``. Composites that need a whole layer have no
cases: the kit checks them through the layers that call them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch

from evener.contracts.ops import OpCase, OpSchema
from evener.errors import DescriptorError

#: What ``OpSchema.cases`` names.
CaseGenerator = Callable[[str, torch.Generator], Iterable[OpCase]]

#: Module → the built-in ops that it has cases for; a generator has the name of its op.
_BUILTIN = {
    "adapters": ("add_adapters",),
    "basic": (
        "embedding", "rms_norm", "add_rms_norm", "layer_norm", "linear", "grouped_linear", "rotary", "act_and_mul",
        "activate", "take_rows", "softcap", "route", "place_experts", "mix_experts", "encode_attention", "greedy",
        "sample", "add_bias", "penalize", "apply_mask", "logprobs",
    ),
    "gated_delta": ("delta_gates", "gated_rms_norm"),
    "latent": ("head_linear", "partial_attention"),
    "ranks": ("all_reduce", "all_gather", "all_reduce_norm", "vocab_embedding", "vocab_greedy"),
}  # fmt: skip
_MODULE_OF = {op: module for module, ops in _BUILTIN.items() for op in ops}


def has_cases(schema: OpSchema) -> bool:
    """Whether there is a generator for this op."""
    return bool(schema.cases) or schema.name in _MODULE_OF


def load_cases(schema: OpSchema) -> CaseGenerator:
    """The generator of an op's cases: the one that its schema names, or the kit's own.

    Raises:
        DescriptorError: there is none, so a kernel for the op cannot be checked.
    """
    if schema.cases:
        module, _, name = schema.cases.partition(":")
    elif schema.name in _MODULE_OF:
        module, name = f"{__name__}.{_MODULE_OF[schema.name]}", schema.name
    else:
        raise DescriptorError(
            f"op {schema.name!r} has no test cases; add cases='module:function' to its OpSchema (docs/conformance.md)"
        )
    generator: CaseGenerator = getattr(importlib.import_module(module), name)
    return generator
