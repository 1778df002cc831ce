"""The reference products of rounded activations, for layers whose kernels round them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from evener.contracts.ops import Bucket, Kernel, OpCall, OpFunction, OpSchema, Use
from evener.contracts.quant import PackedWeight, QuantFormat
from evener.errors import DescriptorError
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.rounding import rounded


class RoundingReference(Kernel):
    """The reference of ``linear`` or ``grouped_linear``, over dequantized weights, with activations rounded for the
    weights and numbers of tokens that another model notes (``Manifest.rounded``).

    Raises:
        DescriptorError: (when called) activations have a fixed scale, which a dequantized weight does not hold.
    """

    packings = (PLAIN,)

    def __init__(self, schema: OpSchema, noted: Mapping[str, tuple[QuantFormat, Sequence[Bucket]]]) -> None:
        self.op, self.name, self._schema, self._noted = schema.name, f"rounding {schema.name}", schema, noted

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        use: Use = _forbidden
        run: OpFunction = load_reference(self._schema)(call.static, use)
        form, buckets = self._noted.get(call.static["weight"].name, (None, ()))
        how = form.activation if form is not None and call.bucket in buckets else None
        if how is None:
            return run
        if how.group < 0:
            raise DescriptorError(f"{call.static['weight'].name} has a fixed scale of activations")

        def rounding(x: torch.Tensor, weight: PackedWeight, *rest: Any) -> Any:
            return run(rounded(x, how), weight, *rest)

        return rounding


def _forbidden(op: str, /, **static: Any) -> OpFunction:
    raise DescriptorError(f"a primitive's reference asked for op {op!r}")


def rounding_references(
    schemas: Iterable[OpSchema], noted: Mapping[str, tuple[QuantFormat, Sequence[Bucket]]]
) -> list[Kernel]:
    """One for each op with weights; none if nothing is rounded."""
    ops = ("linear", "grouped_linear") if any(buckets for _, buckets in noted.values()) else ()
    return [RoundingReference(schema, noted) for schema in schemas if schema.name in ops]
