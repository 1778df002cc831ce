"""Weights that stay packed: blocks of files (GGUF, MXFP4) with two to eight bits a number, integers in groups, and
numbers of tables of 16 (NVFP4, NF4, FP4).

The kernels unpack in registers. With a few tokens they sum a group's products in float32 and scale the sums; with more,
or groups of 16, they scale numbers and round them to the compute dtype before they multiply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from evener.contracts.quant import PackedWeight, Packing, QuantFormat, WeightPart
from evener_kernels_triton.blocks import TABLE_ROWS, PackedForm, Pieces, block_form, block_pieces
from evener_kernels_triton.grouped import group_form, group_pieces, is_grouped, sorted_columns
from evener_kernels_triton.kernel import DTYPES
from evener_kernels_triton.tables import is_table, table_form, table_pieces

#: Numbers that are rearranged at a time.
_AT_A_TIME = 1 << 25


@dataclass(frozen=True)
class Segment:
    """Rows of a packed matrix that are stored alike, or the same rows of each matrix of a stack.

    Attributes:
        first: the first row in the matrix.
        rows, columns: of the segment.
        form: how it is stored.
        low: int16 [spans, rows, words].
        high: [spans, rows, …], of the form's dtype; ``low`` itself if the form has no further bits.
        scales: int32 [spans, rows, words].
        tops: of the shape and dtype that ``PackedForm.tops`` says; ``scales`` if the form has none.
        order: int32 [columns], the column of x for each column; None: as they are.
    """

    first: int
    rows: int
    columns: int
    form: PackedForm
    low: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor
    tops: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def matrix_strides(self) -> tuple[int, int, int, int]:
        """Elements from a stack's matrix to the next, of the four tensors; 0 for those that stand for none."""
        high = self.high.stride(0) if self.form.high else 0
        return self.low.stride(0), high, self.scales.stride(0), self.tops.stride(0) if self.has_tops else 0

    @property
    def has_tops(self) -> bool:
        """Whether ``tops`` is a tensor of its own."""
        return self.form.tops(self.rows, self.columns) is not None

    def tensors(self) -> Iterator[torch.Tensor]:
        """What it holds, each once."""
        yield from (self.low, self.scales)
        if self.form.high:
            yield self.high
        if self.has_tops:
            yield self.tops
        if self.order is not None:
            yield self.order

    def over(self, tensors: Iterator[torch.Tensor]) -> Segment:
        """The same segment over other tensors, in the order of ``tensors``, taken from the front.

        Raises:
            ValueError: one has another shape or dtype.
        """
        mine = list(self.tensors())
        taken = [next(tensors, None) for _ in mine]
        for own, other in zip(mine, taken, strict=True):
            if other is None or (other.shape, other.dtype) != (own.shape, own.dtype):
                raise ValueError(f"a segment lacks a tensor {own.dtype} {list(own.shape)}")
        left = iter(tensor for tensor in taken if tensor is not None)
        low, scales = next(left), next(left)
        high = next(left) if self.form.high else low
        tops = next(left) if self.has_tops else scales
        return replace(self, low=low, high=high, scales=scales, tops=tops, order=next(left, None))

    def __getitem__(self, index: int) -> Segment:
        low, scales = self.low[index], self.scales[index]
        high = self.high[index] if self.form.high else low
        tops = self.tops[index] if self.has_tops else scales
        order = None if self.order is None else self.order[index]
        return replace(self, low=low, high=high, scales=scales, tops=tops, order=order)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix, or a stack of such, in segments of rows."""

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    def __getitem__(self, index: int) -> PackedMatrix:
        return PackedMatrix(self.shape[1:], tuple(segment[index] for segment in self.segments))


class PackedPacking(Packing):
    """Numbers, scales and their scales in arrays of their own; a segment for each run of parts with one format."""

    layout = "triton.packed"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if dtype not in DTYPES:
            return f"computes in {', '.join(DTYPES)}, not {dtype}"
        for part in parts:
            form = _form(part)
            if isinstance(form, str):
                return form
        return None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        total = 0
        for rows, form in segments_of(parts):
            total += form.nbytes(rows, parts[0].columns)
        return total + sum(4 * part.columns for part in parts if part.format.order == "act")

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        return self._stacked([parts], None, device)

    def pack_stack(
        self, matrices: Iterable[Sequence[WeightPart]], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        return self._stacked(matrices, count, device)

    def _stacked(
        self, matrices: Iterable[Sequence[WeightPart]], count: int | None, device: torch.device
    ) -> PackedWeight:
        """A stack of ``count`` matrices; None: the only matrix itself."""
        made: PackedMatrix | None = None
        formats: tuple[QuantFormat, ...] = ()
        for index, parts in enumerate(matrices):
            if made is None:  # the first matrix has the sizes
                made, formats = _room(parts, count or 1, device), tuple(part.format for part in parts)
            _write(made[index], parts)
        assert made is not None, "there is at least one matrix"
        return self._weight(made if count is not None else made[0], formats)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        made: PackedMatrix = packed.data
        return [tensor for segment in made.segments for tensor in segment.tensors()]

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        like = _room(parts, count or 1, torch.device("meta"))
        like = like if count else like[0]
        left = iter(tensors)
        made = replace(like, segments=tuple(segment.over(left) for segment in like.segments))
        if next(left, None) is not None:
            raise ValueError("there are more tensors than such a weight has")
        return self._weight(made, tuple(part.format for part in parts))

    def _weight(self, made: PackedMatrix, formats: tuple[QuantFormat, ...]) -> PackedWeight:
        held = sum(tensor.nbytes for segment in made.segments for tensor in segment.tensors())
        return PackedWeight(self.layout, made.shape, made, held, formats)


PACKED = PackedPacking()


def _form(part: WeightPart) -> PackedForm | str:
    """The form of a part, or why there is none."""
    if is_grouped(part.format):
        return group_form(part)
    return table_form(part) if is_table(part.format) else block_form(part)


def _known_form(part: WeightPart) -> PackedForm:
    form = _form(part)
    assert isinstance(form, PackedForm), "pack is called after supports"
    return form


def segments_of(parts: Sequence[WeightPart]) -> Iterator[tuple[int, PackedForm]]:
    """(rows, form) of each segment of a matrix of these parts, which need no tensors."""
    for _, rows, own in _runs(parts):
        yield rows, _known_form(own[0])


def _runs(parts: Sequence[WeightPart]) -> Iterator[tuple[int, int, list[WeightPart]]]:
    """(first row, rows, parts) of each run of parts with one format."""

    def key(of: tuple[int, WeightPart]) -> tuple[QuantFormat, int]:
        # Each part has an order of its own, and a table of its own, which begins at a multiple of rows.
        index, part = of
        torn = _known_form(part).kind == "table" and part.rows % TABLE_ROWS > 0
        return part.format, (index + 1) * (part.format.order == "act" or torn)

    first = 0
    for _, run in groupby(enumerate(parts), key):
        own = [part for _, part in run]
        rows = sum(part.rows for part in own)
        yield first, rows, own
        first += rows


def _room(parts: Sequence[WeightPart], count: int, device: torch.device) -> PackedMatrix:
    segments = []
    for first, rows, own in _runs(parts):
        form, columns = _known_form(own[0]), own[0].columns
        spans = form.spans(columns)
        low = torch.empty(count, spans, rows, form.low, dtype=torch.int16, device=device)
        scales = torch.empty(count, spans, rows, form.words, dtype=torch.int32, device=device)
        high, tops = low, scales
        if form.high:
            high = torch.empty(count, spans, rows, form.high, dtype=form.high_dtype, device=device)
        if found := form.tops(rows, columns):
            tops = torch.empty(count, *found[0], dtype=found[1], device=device)
        order = None
        if own[0].format.order == "act":
            order = torch.empty(count, columns, dtype=torch.int32, device=device)
        segments.append(Segment(first, rows, columns, form, low, high, scales, tops, order))
    rows = sum(part.rows for part in parts)
    return PackedMatrix((count, rows, parts[0].columns), tuple(segments))


def _write(to: PackedMatrix, parts: Sequence[WeightPart]) -> None:
    for segment, (_, _, own) in zip(to.segments, _runs(parts), strict=True):
        at = 0
        step = max(1, _AT_A_TIME // segment.columns)
        for part in own:
            if segment.order is not None:
                segment.order.copy_(sorted_columns(part))
            pieces = table_pieces if is_table(part.format) else block_pieces
            if is_grouped(part.format):
                pieces = group_pieces
            for first in range(0, part.rows, step):
                stop = min(part.rows, first + step)
                _copy(segment, at + first, pieces(part, segment.form, first, stop, segment.low.device))
            at += part.rows


def _copy(to: Segment, first: int, pieces: Pieces) -> None:
    rows = slice(first, first + pieces.low.shape[0])
    to.low[:, rows].copy_(pieces.low.transpose(0, 1))
    to.scales[:, rows].copy_(pieces.scales.transpose(0, 1))
    if pieces.high is not None:
        to.high[:, rows].copy_(pieces.high.transpose(0, 1))
    if to.form.kind == "table" and pieces.tops is not None:
        to.tops[first // TABLE_ROWS : -(-rows.stop // TABLE_ROWS)].copy_(pieces.tops)
    elif pieces.tops is not None:
        to.tops[:, rows].copy_(pieces.tops.transpose(0, 1))
