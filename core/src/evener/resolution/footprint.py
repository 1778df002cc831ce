"""Memory of one step beside weights and state: activations around and inside ops, and scratch of kernels.

The memory plan (``engine.worker.memory``) reads ``StepFootprint.activations`` and ``.workspace``. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
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

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """By the names of dynamic dimensions."""
        return {**self.others, "T": self.tokens, "R": self.outputs, "…": self.tokens}

    def scaled(self, known: Mapping[str, int]) -> Sizes:
        """Sizes of one op whose caller gives ``known`` (see ``Use``)."""
        return Sizes(self.tokens * known.get("T", 1), self.outputs * known.get("R", 1), known)

    def for_parts(self, schema: OpSchema) -> Sizes:
        """Sizes of a composite's parts; of a composite over output rows, the parts have no more rows than that."""
        leading = {tensor.shape[0] for tensor in (*schema.inputs, *schema.outputs) if tensor.shape}
        return Sizes(self.outputs, self.outputs) if "R" in leading and "T" not in leading else self


@dataclass(frozen=True, eq=False)
class _Counted:
    """Bytes of an op's inputs and outputs, its sizes, and those of its parts."""

    nbytes: int
    sizes: Sizes
    parts: Sizes


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
        self._largest, self._held, self._peak, self._stream = largest, 0, 0, 0
        #: The op that is being resolved; None outside of call sites.
        self._inside: _Counted | None = None
        self._counted: dict[Any, _Counted] = {}

    @property
    def activations(self) -> int:
        """Bytes of the model's stream, and of the tensors around and inside the largest call site."""
        return self._peak + self._stream

    @contextmanager
    def inside(
        self, schema: OpSchema, static: Mapping[str, Any], number: int, bucket: Bucket, known: Mapping[str, int] | None
    ) -> Iterator[None]:
        """Within the block the op's inputs and outputs are held; ``number``: the same for parameters that are alike;
        ``known``: as ``Use`` was given."""
        before = self._held, self._inside
        # Layers are alike, so most ops come again.
        key = schema.name, number, bucket.high, before[1], *(known or {}).items()
        if (found := self._counted.get(key)) is None:
            found = self._counted[key] = self._count(schema, static, bucket, known or {})
        self._held, self._inside = self._held + found.nbytes, found
        self._peak = max(self._peak, self._held)
        try:
            yield
        finally:
            self._held, self._inside = before

    def _count(self, schema: OpSchema, static: Mapping[str, Any], bucket: Bucket, known: Mapping[str, int]) -> _Counted:
        largest, parent = self._largest, self._inside
        step = Sizes(min(bucket.high, largest.tokens), min(bucket.high, largest.outputs))
        sizes = (step if parent is None else parent.parts).scaled(known)
        if parent is None:
            self._stream = max(self._stream, stream_bytes(schema, static, sizes))
        return _Counted(activation_bytes(schema, static, sizes), sizes, sizes.for_parts(schema))

    def add_reference_scratch(self, schema: OpSchema, static: Mapping[str, Any]) -> None:
        """The op that is being resolved is served by its reference."""
        assert self._inside is not None, "the resolver calls it inside of an op"
        self._peak = max(self._peak, self._held + scratch_bytes(schema, static, self._inside.sizes))

    def add_workspace(self, nbytes: int, owner: str) -> None:
        """A kernel that was built asks for ``nbytes`` of scratch."""
        if nbytes > self.workspace:
            self.workspace, self.workspace_owner = nbytes, owner


def activation_bytes(schema: OpSchema, static: Mapping[str, Any], sizes: Sizes) -> int:
    """Bytes of inputs and outputs; an output that may be written over its input counts once."""
    donated = read = written = 0
    for tensor in schema.inputs:
        if tensor.donated:
            donated += _nbytes(tensor, static, sizes)
        else:
            read += _nbytes(tensor, static, sizes)
    for tensor in schema.outputs:
        written += _nbytes(tensor, static, sizes)
    return read + max(donated, written)


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
    return _elements(tensor, static, sizes) * DTYPE_BYTES.get(dtype, 4)


def _elements(tensor: Tensor, static: Mapping[str, Any], sizes: Sizes) -> int:
    total = 1
    for factor in _factors(tensor.shape):
        number = factor if isinstance(factor, int) else sizes.rows.get(factor, static.get(factor))
        total *= number if isinstance(number, int) else 1
    return total


@cache
def _factors(shape: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """What the dimensions of a tensor are products of: numbers and names; a name counts as 1 if only a request decides
    it (the number of log-probabilities). A start asks for the same shapes thousands of times."""
    return tuple(int(part) if part.isdigit() else part for dim in shape for part in str(dim).split("*"))
