"""What a model declares before anything is loaded: weights, tables, call sites and state slots. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from evener.contracts.ops import OpFunction
from evener.contracts.quant import PackedWeight, WeightPart
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop`` of the ``whole`` that is stored along one axis: what this rank holds of them."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """How many it holds."""
        return self.stop - self.start

    def __mul__(self, width: int) -> Span:
        """The span where each element is ``width`` smaller ones."""
        return Span(self.start * width, self.stop * width, self.whole * width)

    def behind(self, offset: int, whole: int) -> Span:
        """The span where ``offset`` others lie before, of ``whole`` together."""
        return Span(self.start + offset, self.stop + offset, whole)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of one tensor, as one where they lie together."""
    found = list(spans)
    together = all(a.stop == b.start for a, b in pairwise(found))
    return [Span(found[0].start, found[-1].stop, found[0].whole)] if together else found


#: An extent of what is stored: all of it, or this rank's span.
Size = int | Span


def held(size: Size) -> int:
    """Elements that this rank holds."""
    return size if isinstance(size, int) else size.size


@dataclass(frozen=True)
class Slice:
    """A rank's part of a stored tensor: a span of one axis."""

    axis: int
    span: Span

    def stored(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored tensor's shape, where the part's is ``shape`` (along the axis: whatever)."""
        return (*shape[: self.axis], self.span.whole, *shape[self.axis + 1 :])


@dataclass(eq=False)
class Weight:
    """A tensor that ops take as it is: a norm, a bias, an embedding table.

    ``sources`` are the checkpoint's names, joined along the first axis; or ``make`` makes the tensor of them, and
    ``shapes`` are theirs. ``slices``: what is read of each source, joined along the slices' axis; none for all of them.
    ``value`` is filled by the loader.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    #: Whether ``load=dummy`` fills it with ones (norms), zeros (biases) or noise.
    dummy: str = "noise"
    value: torch.Tensor | None = None
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    slices: tuple[Slice | None, ...] = ()

    def pieces(self) -> Iterator[tuple[str, Slice | None]]:
        """Every source with what is read of it."""
        return zip(self.sources, self.slices or (None,) * len(self.sources), strict=True)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, of what was read of each source."""
        import torch

        if self.make is not None:
            return self.make(pieces)
        axis = next((cut.axis for cut in self.slices if cut is not None), 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=axis)


@dataclass(eq=False)
class LinearWeight:
    """A linear weight of one or more parts, stacked along out-features.

    ``slices``: which rows (axis 0) or columns (axis 1) of what is stored each part is; a part's sizes are the slice's.
    ``out`` is the type of its products if that is not ``dtype``; ``experts`` the number of matrices, 0 for one that is
    no stack. ``layout`` is chosen by resolution, ``value`` filled by the loader.
    """

    #: The op that computes with it.
    op: ClassVar[str] = "linear"

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
    #: Its rows are made as long as 1 when they are loaded.
    unit_rows: bool = False

    def pieces(self) -> Iterator[tuple[WeightPart, Slice | None]]:
        """Every part with the slice that it is; None is all that is stored."""
        return zip(self.parts, self.slices or (None,) * len(self.parts), strict=True)


@dataclass(eq=False)
class StackedWeight(LinearWeight):
    """A stack of ``experts`` linear weights of equal parts, declared as one: ``parts``, ``rows`` and ``columns`` are
    those of one matrix.

    A part's name holds ``{}`` where the checkpoint writes the expert's number; a name without it is one stored tensor
    with the experts along its first axis. ``transposed``: such a tensor, if unquantized, is [experts, columns, rows].
    """

    op: ClassVar[str] = "grouped_linear"

    transposed: bool = False

    def stored_parts(self) -> Iterator[str]:
        """Names of everything that the checkpoint stores for it."""
        for part in self.parts:
            count = self.experts if "{}" in part.name else 1
            yield from (part.name.format(expert) for expert in range(count))


@dataclass(eq=False)
class Table:
    """A tensor computed once on the device (rotary angles). ``make`` takes the device; equal keys share one tensor."""

    key: tuple[Any, ...]
    nbytes: int
    make: Callable[[torch.device], torch.Tensor]
    value: torch.Tensor | None = None


Declared = Weight | LinearWeight | Table


@dataclass(eq=False)
class StateSlot:
    """One layer's state. The engine fills ``group`` (index into a step's metas), ``provider`` and ``views``."""

    name: str
    spec: StateSpec
    attention: AttentionSpec
    group: int = -1
    provider: StateProvider | None = None
    views: Any = None


@dataclass(eq=False)
class CallSite:
    """One place where a model calls an op. Resolution fills ``table``: one plain callable a token bucket."""

    path: str
    op: str
    static: Mapping[str, Any]
    table: tuple[OpFunction, ...] = ()

    def at(self, rows: int) -> OpFunction:
        """The callable for so many rows, where they are not the step's; buckets end at powers of two."""
        return self.table[min(max(0, rows - 1).bit_length(), len(self.table) - 1)]


@dataclass(eq=False)
class WeightGroup:
    """Declared weights that one op takes as a tuple. ``values`` is that tuple once they are loaded."""

    kind: type[tuple[Any, ...]]
    fields: Mapping[str, Declared | None]
    values: Any = field(default=None)

    def bind(self) -> None:
        """Read the loaded values."""
        self.values = self.kind(**{k: None if w is None else w.value for k, w in self.fields.items()})
