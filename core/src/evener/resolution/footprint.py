"""Memory of one step beside weights and state: activations around and inside ops, and scratch of kernels.

The memory plan (``engine.worker.memory``) reads ``StepFootprint.activations`` and ``.workspace``. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from evener.contracts.ops import Bucket, OpSchema, Tensor
from evener.contracts.quant import DTYPE_BYTES

#: First dimensions that grow with a step; a tensor without one is a weight.
_GROWING = ("T", "R", "…")


@dataclass(frozen=True)
class Sizes:
    """Rows of the largest step: ``tokens`` that are computed, ``outputs`` that are sampled; ``others``: dynamic
    dimensions that a call site knows."""

    tokens: int
    outputs: int
    others: Mapping[str, int] = field(default_factory=dict)

    def scaled(self, known: Mapping[str, int]) -> Sizes:
        """Sizes of one op whose caller gives ``known`` (see ``Use``)."""
        return Sizes(self.tokens * known.get("T", 1), self.outputs * known.get("R", 1), known)

    def for_parts(self, schema: OpSchema) -> Sizes:
        """Sizes of a composite's parts; of a composite over output rows, the parts have no more rows than that."""
        leading = {tensor.shape[0] for tensor in (*schema.inputs, *schema.outputs) if tensor.shape}
        return Sizes(self.outputs, self.outputs) if "R" in leading and "T" not in leading else self


class StepFootprint:
    """Adds up what a step holds, while its ops are resolved. Call sites run one after another, so the largest counts.

    Args:
        largest: rows of the largest step.

    Attributes:
        workspace: bytes of the largest scratch that a chosen kernel asks for.
        workspace_owner: that kernel, and at how many tokens; empty if no kernel asks for any.
    """

    def __init__(self, largest: Sizes) -> None:
        self.workspace, self.workspace_owner = 0, ""
        self._counted: dict[tuple[Any, ...], tuple[int, tuple[Sizes, Sizes]]] = {}
        self._largest, self._held, self._peak, self._stream = largest, 0, 0, 0
        #: Sizes of the op that is being resolved, and of its parts; None outside of call sites.
        self._sizes: tuple[Sizes, Sizes] | None = None

    @property
    def activations(self) -> int:
        """Bytes of the model's stream, and of the tensors around and inside the largest call site."""
        return self._peak + self._stream

    @contextmanager
    def inside(
        self, schema: OpSchema, static: Mapping[str, Any], bucket: Bucket, known: Mapping[str, int] | None
    ) -> Iterator[None]:
        """Within the block the op's inputs and outputs are held; ``known``: as ``Use`` was given."""
        before, high, largest = (self._held, self._sizes), bucket.high, self._largest
        numbers = (item for item in static.items() if isinstance(item[1], (int, str)))
        # Layers are alike, so most ops repeat. ``_counted`` keeps the sizes alive, so no ``id`` is used again.
        key = (schema.name, high, id(self._sizes), *(known or {}).items(), None, *numbers)
        if key not in self._counted:
            whole = self._sizes[1] if self._sizes else Sizes(min(high, largest.tokens), min(high, largest.outputs))
            sizes = whole.scaled(known or {})
            if self._sizes is None:
                self._stream = max(self._stream, stream_bytes(schema, static, sizes))
            self._counted[key] = activation_bytes(schema, static, sizes), (sizes, sizes.for_parts(schema))
        nbytes, self._sizes = self._counted[key]
        self._held += nbytes
        self._peak = max(self._peak, self._held)
        try:
            yield
        finally:
            self._held, self._sizes = before

    def add_reference_scratch(self, schema: OpSchema, static: Mapping[str, Any]) -> None:
        """Count the scratch of the op that is being resolved: its reference serves it."""
        assert self._sizes is not None, "the resolver calls it inside of an op"
        self._peak = max(self._peak, self._held + scratch_bytes(schema, static, self._sizes[0]))

    def add_workspace(self, nbytes: int, owner: str) -> None:
        """Count the ``nbytes`` of scratch that the kernel ``owner`` asks for."""
        if nbytes > self.workspace:
            self.workspace, self.workspace_owner = nbytes, owner


def activation_bytes(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes of inputs and outputs; an output that may be written over its input counts once."""
    donated, read = (sum(_nbytes(t, static, sizes) for t in schema.inputs if t.donated is on) for on in (True, False))
    return read + max(donated, sum(_nbytes(tensor, static, sizes) for tensor in schema.outputs))


def scratch_bytes(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes that the op's reference holds beside its inputs and outputs."""
    first = next((tensor for tensor in schema.inputs if _grows(tensor)), None)
    return 0 if first is None else int(schema.scratch * _elements(first, static, sizes))


def stream_bytes(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes of the op's first input in float32, if it has one row for each token: a model adds to its residual stream
    outside of call sites, and holds it until the step is sampled."""
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
    rows: dict[str, int] = {**sizes.others, "T": sizes.tokens, "R": sizes.outputs, "…": sizes.tokens}
    found = [f if isinstance(f, int) else rows.get(f, static.get(f, 1)) for f in _factors(tensor.shape)]
    return math.prod([number if isinstance(number, int) else 1 for number in found])


@cache
def _factors(shape: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The factors of a tensor's dimensions: numbers and names. A name counts as 1 if only a request decides it (the
    number of log-probabilities). Cached because a start asks for the same shapes thousands of times."""
    return tuple(int(part) if part.isdigit() else part for dim in shape for part in str(dim).split("*"))
