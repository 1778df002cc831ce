"""How many bytes the weights will take, from file headers and packings, before a weight is read. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import DTYPE_BYTES, Packing, QuantFormat, QuantScheme, plain
from evener.layers.declared import Declared, LinearWeight, Slice, Weight
from evener.loading.scheme import Unquantized


@dataclass(frozen=True)
class WeightEstimate:
    """What weights will hold.

    Attributes:
        counted: bytes in memory, second copies included.
        mapped: bytes that stay pages of the weight files.
        second_copies: bytes of what is held more than once, as its readers want different layouts; a part of the two.
    """

    counted: int
    mapped: int
    second_copies: int = 0


def estimate_weights(
    declared: Sequence[Declared], packings: Mapping[str, Packing], headers: Headers | None,
    scheme: QuantScheme | None = None, mappable: bool = True, copied: frozenset[str] = frozenset(),
) -> WeightEstimate:  # fmt: skip
    """Bytes of everything that was declared.

    Args:
        declared: a builder's ``weights``; each ``LinearWeight`` has its ``layout``.
        packings: by layout.
        headers: of the checkpoint; None for ``load=dummy``, which maps nothing.
        scheme: how the checkpoint stores linear weights; default unquantized.
        mappable: False on a device that cannot read the host's memory.
        copied: of the checkpoint: tensors that are not mapped anyway.
    """
    book = _Book(headers or {}, scheme or Unquantized(), mappable, copied)
    for item in declared:
        if isinstance(item, Weight):
            book.add_tensor(item)
        elif isinstance(item, LinearWeight) and item.experts:
            book.counted += item.experts * packings[item.layout].nbytes(item.parts, item.dtype)
        elif isinstance(item, LinearWeight):
            book.add_linear(item, packings[item.layout])
        else:
            book.counted += item.nbytes
    return WeightEstimate(book.counted, book.mapped, book.second_copies)


class _Book:
    """Running sums. ``held``: under which keys each stored tensor lies in memory already."""

    def __init__(self, headers: Headers, scheme: QuantScheme, mappable: bool, copied: frozenset[str]) -> None:
        self.headers, self.scheme, self.mappable, self.copied = headers, scheme, mappable, copied
        self.counted = self.mapped = self.second_copies = 0
        self.held: dict[str, set[tuple[Any, ...]]] = {}

    def add_tensor(self, item: Weight) -> None:
        nbytes = int(math.prod(item.shape) * DTYPE_BYTES[item.dtype])
        if item.make is not None:
            self.second_copies += nbytes
        if len(item.sources) > 1 or item.make is not None:
            self.counted += nbytes
        else:
            name, cut = next(item.pieces())
            self._hold(name, (item.dtype, cut), nbytes, self._mapped(name, plain(item.dtype), cut))

    def add_linear(self, item: LinearWeight, packing: Packing) -> None:
        if packing.keeps(item.parts):
            for part, cut in item.pieces():
                # A plain part is converted before it is packed, a quantized one is packed as stored.
                form = plain(item.dtype) if part.format.plain else part.format
                nbytes = packing.nbytes([part], item.dtype)
                self._hold(part.name, (form.storage, cut), nbytes, self._mapped(part.name, form, cut))
        elif len(item.parts) > 1:
            self.counted += packing.nbytes(item.parts, item.dtype)
        else:
            nbytes = packing.nbytes(item.parts, item.dtype)
            self._hold(item.parts[0].name, (f"packed:{packing.layout}", *item.slices), nbytes, False)

    def _mapped(self, name: str, form: QuantFormat, cut: Slice | None) -> bool:
        """Whether what is stored under ``name`` is used as it lies in its file: all of it, or some of its rows."""
        if cut is not None and cut.axis:
            return False
        if not self.mappable or not self.copied.isdisjoint(self.scheme.tensors(name, self.headers).values()):
            return False
        stored = self.scheme.part(name, self.headers)
        return stored is not None and stored.format == form

    def _hold(self, name: str, key: tuple[Any, ...], nbytes: int, mapped: bool) -> None:
        held = self.held.setdefault(name, set())
        if key in held:
            return
        if held:
            self.second_copies += nbytes
        held.add(key)
        if mapped:
            self.mapped += nbytes
        else:
            self.counted += nbytes
