"""How many bytes the activations around one op take: its inputs and outputs, and what its reference holds in between.
Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evener.contracts.ops import OpSchema, Tensor
from evener.contracts.quant import DTYPE_BYTES

#: Dimensions that grow with a step; a tensor without one is a weight.
_GROWING = ("T", "R", "…")


@dataclass(frozen=True)
class Sizes:
    """Rows of the largest step: ``tokens`` that are computed, ``outputs`` of which are sampled; ``others`` are dynamic
    dimensions that a call site knows."""

    tokens: int
    outputs: int
    others: Mapping[str, int] = field(default_factory=dict)

    def at(self, known: Mapping[str, int] | None) -> Sizes:
        """Those of one op, of which its caller says ``known`` (see ``Use``)."""
        known = known or {}
        return Sizes(self.tokens * known.get("T", 1), self.outputs * known.get("R", 1), known)

    def inside(self, schema: OpSchema) -> Sizes:
        """Sizes of the ops that a composite is made of: one over output rows has no others."""
        leading = {tensor.shape[0] for tensor in (*schema.inputs, *schema.outputs) if tensor.shape}
        return Sizes(self.outputs, self.outputs) if "R" in leading and "T" not in leading else self


def activations(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes of inputs and outputs; an output that may be written over its input counts once."""
    donated, read = (sum(_nbytes(t, static, sizes) for t in schema.inputs if t.donated is on) for on in (True, False))
    return read + max(donated, sum(_nbytes(tensor, static, sizes) for tensor in schema.outputs))


def scratch(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes that the reference holds beside its inputs and outputs."""
    first = next((tensor for tensor in schema.inputs if _grows(tensor)), None)
    return 0 if first is None else int(schema.scratch * _elements(first, static, sizes))


def stream(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes of the op's first input in float32 if it has a row a token: a model joins its stream outside of call sites,
    and holds it until the step is sampled."""
    first = next((tensor for tensor in schema.inputs if _grows(tensor)), None)
    return 0 if first is None or first.shape[0] != "T" else 4 * _elements(first, static, sizes)


def _grows(tensor: Tensor) -> bool:
    return bool(tensor.shape) and tensor.shape[0] in _GROWING


def _nbytes(tensor: Tensor, static: Mapping[str, Any], sizes: Sizes) -> int:
    if not _grows(tensor):
        return 0
    dtype = {"*": static.get("dtype", "float32"), "out": static.get("out", "float32")}.get(tensor.dtype, tensor.dtype)
    return int(_elements(tensor, static, sizes) * DTYPE_BYTES.get(dtype, 4))


def _elements(tensor: Tensor, static: Mapping[str, Any], sizes: Sizes) -> int:
    known = {**static, **sizes.others, "T": sizes.tokens, "R": sizes.outputs, "…": sizes.tokens}
    return math.prod(_dimension(dim, known) for dim in tensor.shape)


def _dimension(dim: str | int, known: Mapping[str, Any]) -> int:
    """A number, a name, or a product of those; 1 for what a request decides (how many log-probabilities)."""
    if isinstance(dim, int):
        return dim
    found = (int(part) if part.isdigit() else known.get(part, 1) for part in dim.split("*"))
    return math.prod(number if isinstance(number, int) else 1 for number in found)
