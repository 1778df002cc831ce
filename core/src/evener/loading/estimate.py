"""How many bytes the weights will take, from file headers and packings, before a weight is read. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from evener.contracts.checkpoint import Headers
from evener.contracts.declared import Declared, LinearWeight, Slice, Weight
from evener.contracts.quant import DTYPE_BYTES, Packing, QuantFormat, QuantScheme, plain
from evener.loading.scheme import Unquantized, scheme_of


@dataclass(frozen=True)
class WeightEstimate:
    """Bytes that weights will take.

    Attributes:
        allocated: bytes in memory, second copies included.
        mapped: bytes that stay pages of the weight files.
        second_copies: bytes of further copies, for tensors whose readers need different layouts; counted in the other
            two.
    """

    allocated: int
    mapped: int
    second_copies: int = 0

    def __add__(self, other: WeightEstimate) -> WeightEstimate:
        """Both together."""
        return WeightEstimate(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def estimate_weights(
    declared: Sequence[Declared], packings: Mapping[str, Packing], headers: Headers | None,
    scheme: QuantScheme | None = None, mappable: bool = True, copied: frozenset[str] = frozenset(),
) -> WeightEstimate:  # fmt: skip
    """Bytes of all declared weights and tables.

    Args:
        declared: a builder's ``weights``; each ``LinearWeight`` has its ``layout``.
        packings: by layout.
        headers: of the checkpoint; None for ``load=dummy``, which maps nothing.
        scheme: how the checkpoint stores linear weights; default unquantized.
        mappable: whether the device reads host memory, so that weights can stay mapped.
        copied: of the checkpoint: tensors that cannot be mapped.
    """
    totals = _ByteTotals(headers or {}, scheme or Unquantized(), mappable, copied)
    for item in declared:
        if isinstance(item, Weight):
            totals.add_tensor(item)
        elif isinstance(item, LinearWeight) and item.experts:
            totals.allocated += item.experts * packings[item.layout].nbytes(item.parts, item.dtype)
        elif isinstance(item, LinearWeight):
            totals.add_linear(item, packings[item.layout])
        else:
            totals.allocated += item.nbytes
    return WeightEstimate(totals.allocated, totals.mapped, totals.second_copies)


class _ByteTotals:
    """Running sums. ``held``: for each stored tensor, the forms (dtype or layout, slice) that are counted already."""

    def __init__(self, headers: Headers, scheme: QuantScheme, mappable: bool, copied: frozenset[str]) -> None:
        self.headers, self.scheme, self.mappable, self.copied = headers, scheme, mappable, copied
        self.allocated = self.mapped = self.second_copies = 0
        self.held: dict[str, set[tuple[Any, ...]]] = {}

    def add_tensor(self, item: Weight) -> None:
        nbytes = int(math.prod(item.shape) * DTYPE_BYTES[item.dtype])
        if item.make is not None:
            self.second_copies += nbytes
        if len(item.sources) > 1 or item.make is not None:
            self.allocated += nbytes
        else:
            name, cut = next(item.pieces())
            self._hold(name, (item.dtype, cut), nbytes, self._mapped(name, plain(item.dtype), cut))

    def add_linear(self, item: LinearWeight, packing: Packing) -> None:
        nbytes = packing.nbytes(item.parts, item.dtype)
        if packing.keeps_storage(item.parts):
            for part, cut in item.pieces():
                # A plain part is converted before it is packed, a quantized one is packed as stored.
                form = plain(item.dtype) if part.format.plain else part.format
                plain_bytes = int(part.rows * part.columns * DTYPE_BYTES[item.dtype])
                own = plain_bytes if part.format.plain else packing.nbytes([part], item.dtype)
                self._hold(part.name, (form.storage, cut), own, self._mapped(part.name, form, cut))
                nbytes -= own
        elif len(item.parts) == 1:
            self._hold(item.parts[0].name, (f"packed:{packing.layout}", *item.slices), nbytes, False)
            return
        self.allocated += nbytes

    def _mapped(self, name: str, form: QuantFormat, cut: Slice | None) -> bool:
        """Whether the tensor ``name``, or some of its rows, is used as it is in its file."""
        if cut is not None and cut.axis:
            return False
        scheme = scheme_of(name, self.scheme, self.headers)
        if not self.mappable or not self.copied.isdisjoint(scheme.tensors(name, self.headers).values()):
            return False
        stored = scheme.part(name, self.headers)
        return stored is not None and stored.format == form

    def _hold(self, name: str, key: tuple[Any, ...], nbytes: int, mapped: bool) -> None:
        held = self.held.setdefault(name, set())
        if key in held:
            return
        self.second_copies += nbytes if held else 0
        self.mapped += nbytes if mapped else 0
        self.allocated += 0 if mapped else nbytes
        held.add(key)
