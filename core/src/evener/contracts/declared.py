"""What a model declares before anything is loaded: weights, tables, call sites and state slots. Torch-free.

Kernels see these declarations in ``OpCall.static``: a weight is a ``LinearWeight``, the state a ``StateSlot``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from evener.contracts.adapters import AdaptedProduct
from evener.contracts.ops import OpFunction
from evener.contracts.placement import Placement
from evener.contracts.quant import PackedWeight, WeightPart
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Span:
    """The elements along one axis of a stored tensor that this rank has: ``start`` to ``stop`` of ``whole``."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """Number of elements of this rank."""
        return self.stop - self.start

    def __mul__(self, width: int) -> Span:
        """The same span, with each element cut into ``width`` smaller ones."""
        return Span(self.start * width, self.stop * width, self.whole * width)

    def shifted(self, offset: int, whole: int) -> Span:
        """The same span in a tensor of ``whole`` elements, after ``offset`` other elements."""
        return Span(self.start + offset, self.stop + offset, whole)


@dataclass(frozen=True)
class Slice:
    """A rank's part of a stored tensor: a span along one axis."""

    axis: int
    span: Span

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stored tensor, from the ``shape`` of the part (any size along the axis)."""
        return (*shape[: self.axis], self.span.whole, *shape[self.axis + 1 :])


@dataclass(eq=False)
class Weight:
    """A tensor that ops take as it is: a norm, a bias, an embedding table.

    Attributes:
        name: unique in the model.
        shape, dtype: of ``value``, on this rank.
        sources: names in the checkpoint. Without ``make`` they are concatenated, along the axis of the slices or the
            first axis.
        dummy: what ``load=dummy`` fills it with: "ones" (norms), "zeros" (biases) or "noise".
        value: the tensor; set by the loader.
        make: (optional) computes the tensor from the sources.
        placement: where it is; None: on the device.
        shapes: the shapes of the sources; empty if all have ``shape``.
        slices: what this rank reads of each source, None for all of it; empty if all are read whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    dummy: str = "noise"
    value: torch.Tensor | None = None
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    slices: tuple[Slice | None, ...] = ()
    placement: Placement | None = None

    def pieces(self) -> Iterator[tuple[str, Slice | None]]:
        """Each source, and what is read of it."""
        return zip(self.sources, self.slices or (None,) * len(self.sources), strict=True)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, from what was read of each source."""
        import torch

        if self.make is not None:
            return self.make(pieces)
        axis = next((cut.axis for cut in self.slices if cut is not None), 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=axis)


@dataclass(eq=False)
class LinearWeight:
    """A linear weight of one or more parts, concatenated along the out-features.

    Attributes:
        name: unique in the model.
        parts: the stored tensors, with this rank's sizes.
        rows, columns: out-features and in-features of all parts together, on this rank.
        dtype: compute dtype.
        out: dtype of the product; None: ``dtype``.
        layout: the layout of the packing; set by resolution.
        value: the packed weight; set by the loader.
        experts: number of matrices; 0 if it is not a stack.
        slices: which rows (axis 0) or columns (axis 1) of the stored tensor each part is, None for all; empty if all
            are whole.
        normalize_rows: the loader divides each row by its length.
        adapters: what is added to its products; None: nothing.
        placement: where it is; None: on the device.
        op: the op that computes with it: "linear", or "embedding" for a quantized table of which rows are read.
    """

    name: str
    parts: tuple[WeightPart, ...]
    rows: int
    columns: int
    dtype: str
    out: str | None = None
    layout: str = ""
    value: PackedWeight | None = None
    experts: int = 0
    slices: tuple[Slice | None, ...] = ()
    normalize_rows: bool = False
    adapters: AdaptedProduct | None = None
    placement: Placement | None = None
    op: str = "linear"

    def pieces(self) -> Iterator[tuple[WeightPart, Slice | None]]:
        """Each part, and which slice of the stored tensor it is; None: all of it."""
        return zip(self.parts, self.slices or (None,) * len(self.parts), strict=True)


@dataclass(eq=False)
class StackedWeight(LinearWeight):
    """A stack of ``experts`` linear weights with equal parts: ``parts``, ``rows`` and ``columns`` describe one matrix.

    A part's name has ``{}`` in place of the expert's number in the checkpoint. A name without ``{}`` is one stored
    tensor with the experts along its first axis; with ``transposed`` it is [experts, columns, rows] if unquantized.
    ``held``: (optional) which of the checkpoint's experts these are; its ``whole`` is 0 if they are all.
    """

    op: str = "grouped_linear"
    transposed: bool = False
    held: Span = Span(0, 0, 0)

    def stored_parts(self) -> Iterator[str]:
        """Names of all its tensors in the checkpoint."""
        for name in (part.name for part in self.parts):
            yield from (name.format(self.held.start + n) for n in range(self.experts if "{}" in name else 1))


@dataclass(eq=False)
class Table:
    """A tensor that is computed once on the device (rotary angles): ``make(device)`` returns ``value``, with ``nbytes``
    bytes. Tables with equal keys share one tensor. ``placement``: where it is; None: on the device."""

    key: tuple[Any, ...]
    nbytes: int
    make: Callable[[torch.device], torch.Tensor]
    value: torch.Tensor | None = None
    placement: Placement | None = None


Declared = Weight | LinearWeight | Table


@dataclass(eq=False)
class StateSlot:
    """One layer's state. The engine sets ``group`` (an index into a step's ``metas``), ``provider``, ``views`` (what
    ``StateProvider.bind`` returned) and, for quantized state, ``scales``: for each tensor, one for each head."""

    name: str
    spec: StateSpec
    attention: AttentionSpec
    group: int = -1
    provider: StateProvider | None = None
    views: Any = None
    scales: tuple[tuple[float, ...], ...] = ()


@dataclass(eq=False)
class CallSite:
    """One place where a model calls an op. Resolution sets ``table``: one plain callable per token bucket."""

    path: str
    op: str
    static: Mapping[str, Any]
    table: tuple[OpFunction, ...] = ()

    def at(self, rows: int) -> OpFunction:
        """The callable for a number of rows that is not the step's number of tokens. Buckets end at powers of two."""
        return self.table[min(max(0, rows - 1).bit_length(), len(self.table) - 1)]


@dataclass(eq=False)
class WeightGroup:
    """Declared weights that one op takes as a named tuple of type ``kind``. ``values``: that tuple, after loading."""

    kind: type[tuple[Any, ...]]
    fields: Mapping[str, Declared | None]
    values: Any = field(default=None)

    def bind(self) -> None:
        """Set ``values`` from the loaded weights."""
        self.values = self.kind(**{k: None if w is None else w.value for k, w in self.fields.items()})
