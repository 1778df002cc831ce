"""Weights of one byte an element (float8, int8) with scales, as they are stored.

The kernels convert an element to the compute dtype, which holds it exactly, sum the products of a block in float32, and
multiply the sum by the block's scale. Where the format allows it and the device multiplies such elements, products of
many tokens are those of rounded activations (``rounded``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from evener.contracts.quant import PackedWeight, Packing, QuantFormat, Rounding, WeightPart
from evener_kernels_triton.kernel import DTYPES
from evener_kernels_triton.upload import Uploads

#: Kinds of elements, by ``QuantFormat.storage``.
KINDS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
_SCALES = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
_SCALE_BYTES = 4
#: Elements of a word, by which kernels for one token read them.
WORD = 4
#: A tile of columns is at least so wide, and has whole blocks or is within one.
_LEAST_WIDE = 16


class Form(NamedTuple):
    """How a matrix is stored, as the kernels' constants.

    Attributes:
        kind: a value of ``KINDS``; "" for plain numbers.
        high: rows that share a scale.
        wide: columns that share a scale, a power of two; 0: all of a row.
    """

    kind: str = ""
    high: int = 1
    wide: int = 0

    def constants(self, ptx: bool) -> dict[str, str | int | bool]:
        """Arguments of the kernels. ``ptx``: the device takes PTX of compute capability 8.0."""
        return {"KIND": self.kind, "PTX": ptx, "HIGH": self.high, "WIDE": self.wide}

    def word_constants(self, cast: bool) -> dict[str, str | int | bool]:
        """Arguments of the kernels that read words. ``cast``: the device converts e4m3 itself."""
        return {"KIND": self.kind, "CAST": cast and self.kind == "e4m3", "HIGH": self.high, "WIDE": self.wide}


PLAIN_FORM = Form()


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of stored elements, or a stack of such.

    Attributes:
        elements: uint8 (float8) or int8 [rows, columns], or [matrices, rows, columns].
        scales: float32 [rows / form.high, blocks] on the same device, rounded up; a stack's has one more axis before.
        form: how it is stored.
        activation: how activations may be rounded.
        fixed: the scale that they then have, float32 [1], or the same one for each matrix; None: they have scales of
            their own.
        one_scale: all scales of a matrix are the same number.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    form: Form
    activation: Rounding | None = None
    fixed: torch.Tensor | None = None
    one_scale: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix or stack."""
        return self.elements.shape

    def __getitem__(self, index: int) -> StoredMatrix:
        fixed = None if self.fixed is None else self.fixed[index : index + 1]
        return replace(self, elements=self.elements[index], scales=self.scales[index], fixed=fixed)


def pieces(weight: torch.Tensor | StoredMatrix) -> tuple[torch.Tensor, torch.Tensor, int, Form]:
    """(elements, scales, blocks of a row, form), as the kernels take them; plain numbers have themselves as scales."""
    if isinstance(weight, StoredMatrix):
        return weight.elements, weight.scales, weight.scales.shape[-1], weight.form
    return weight, weight, 1, PLAIN_FORM


def in_words(weight: torch.Tensor | StoredMatrix) -> bool:
    """Whether rows of stored elements are whole words of four; plain numbers are not asked."""
    return not isinstance(weight, StoredMatrix) or weight.shape[-1] % WORD == 0


def words(weight: torch.Tensor | StoredMatrix) -> tuple[torch.Tensor, torch.Tensor, int, Form]:
    """``pieces``, with stored elements as words of four, int32 [rows, columns / 4]."""
    elements, scales, blocks, form = pieces(weight)
    return elements.view(torch.int32) if form.kind else elements, scales, blocks, form


class StoredPacking(Packing):
    """Row-major elements, and float32 scales for equal blocks of all parts."""

    layout = "triton.stored"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if dtype not in DTYPES:
            return f"computes in {', '.join(DTYPES)}, not {dtype}"
        storages, widths = {part.format.storage for part in parts}, {_wide(part) for part in parts}
        rounded = {part.format.activation for part in parts}
        odd = storages - KINDS.keys()
        if odd:
            return f"reads {', '.join(KINDS)}, not {min(odd)}"
        if len(storages) > 1 or len(widths) > 1 or len(rounded) > 1:
            return "the parts are stored differently"
        for part in parts:
            if part.format.scale not in _SCALES:
                return f"reads scales in {', '.join(_SCALES)}, not {part.format.scale}"
            if part.format.zero is not None or part.format.order != "row":
                return "does not know zero points or orders of columns"
        (wide,) = widths
        if wide and (wide & (wide - 1) or wide < _LEAST_WIDE):
            return f"reads blocks of a power of two of columns, from {_LEAST_WIDE}, not {wide}"
        return None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        rows, columns, high = sum(part.rows for part in parts), parts[0].columns, _shared_rows(parts)
        fixed = _has_fixed_scale(parts[0].format)
        return rows * columns + (-(-rows // high) * _blocks(parts[0]) + fixed) * _SCALE_BYTES

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
        made = small = None
        formats: tuple[QuantFormat, ...] = ()
        with Uploads(device) as uploads:
            for index, parts in enumerate(matrices):
                if made is None or small is None:  # the first matrix has the sizes
                    made, formats = _room(parts, count or 1, device), tuple(part.format for part in parts)
                    small = _on_host(made)
                _write(made.elements[index], small[index], parts, uploads)
        assert made is not None and small is not None, "there is at least one matrix"
        made = replace(made, one_scale=_one_scale(small.scales))
        made.scales.copy_(small.scales)
        if made.fixed is not None and small.fixed is not None:  # parts and matrices share the largest
            made.fixed.copy_(small.fixed.amax().expand_as(made.fixed))
        return self._weight(made if count is not None else made[0], formats)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        made: StoredMatrix = packed.data
        return [made.elements, made.scales, *([] if made.fixed is None else [made.fixed])]

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        like = _room(parts, count or 1, torch.device("meta"))
        like = like if count else like[0]
        wanted = [(t.shape, t.dtype) for t in (like.elements, like.scales, like.fixed) if t is not None]
        if [(t.shape, t.dtype) for t in tensors] != wanted:
            raise ValueError(f"the tensors do not have the shapes {[list(shape) for shape, _ in wanted]}")
        fixed = tensors[2] if len(tensors) > 2 else None
        made = replace(like, elements=tensors[0], scales=tensors[1], fixed=fixed, one_scale=_one_scale(tensors[1]))
        return self._weight(made, tuple(part.format for part in parts))

    def _weight(self, made: StoredMatrix, formats: tuple[QuantFormat, ...]) -> PackedWeight:
        fixed = 0 if made.fixed is None else made.fixed.nbytes
        held = made.elements.nbytes + made.scales.nbytes + fixed
        return PackedWeight(self.layout, tuple(made.shape), made, held, formats)


STORED = StoredPacking()


def _wide(part: WeightPart) -> int:
    """Columns that share a scale; 0: all of a row."""
    group = max(0, part.format.group)
    return 0 if group >= part.columns else group


def _has_fixed_scale(form: QuantFormat) -> bool:
    return form.activation is not None and form.activation.group < 0


def _blocks(part: WeightPart) -> int:
    return -(-part.columns // _wide(part)) if _wide(part) else 1


def _shared_rows(parts: Sequence[WeightPart]) -> int:
    """Rows that share a scale once the parts are one matrix: those of the format if every part ends with a whole block,
    else one."""
    highs = {part.format.group_out if part.format.group > 0 else 1 for part in parts}
    (high,) = highs if len(highs) == 1 else (1,)
    return high if all(part.rows % high == 0 for part in parts[:-1]) else 1


def form_of(parts: Sequence[WeightPart]) -> Form:
    """How a matrix of these parts is stored."""
    return Form(KINDS[parts[0].format.storage], _shared_rows(parts), _wide(parts[0]))


def _room(parts: Sequence[WeightPart], count: int, device: torch.device) -> StoredMatrix:
    rows, columns, form = sum(part.rows for part in parts), parts[0].columns, form_of(parts)
    high = form.high
    dtype = torch.int8 if form.kind == "int8" else torch.uint8
    elements = torch.empty(count, rows, columns, dtype=dtype, device=device)
    scales = torch.empty(count, -(-rows // high), _blocks(parts[0]), dtype=torch.float32, device=device)
    activation = parts[0].format.activation
    fixed = torch.zeros(count, dtype=torch.float32, device=device) if _has_fixed_scale(parts[0].format) else None
    return StoredMatrix(elements, scales, form, activation, fixed)


def _one_scale(scales: torch.Tensor) -> bool:
    """Whether each matrix has one scale. Parts may agree on theirs: NVIDIA's tools make them the same."""
    return scales.shape[-1] == 1 and bool((scales == scales[..., :1, :]).all())


def _on_host(made: StoredMatrix) -> StoredMatrix:
    """The same on the host, for what is small: one copy to the device takes as long as that of one matrix."""
    fixed = None if made.fixed is None else torch.zeros_like(made.fixed, device="cpu")
    return replace(made, scales=torch.empty_like(made.scales, device="cpu"), fixed=fixed)


def _write(elements: torch.Tensor, to: StoredMatrix, parts: Sequence[WeightPart], uploads: Uploads) -> None:
    """Write a matrix: its stored elements through ``uploads``, and the rest into ``to``, which is on the host."""
    at, high = 0, to.form.high
    for part in parts:
        stored, scale = part.tensors["weight"], part.tensors["scale"].float()
        shape, dtype = (part.rows, part.columns), getattr(torch, part.format.storage)
        if tuple(stored.shape) != shape or stored.dtype is not dtype:
            raise ValueError(f"{part.name} is {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}")
        uploads.copy(elements[at : at + part.rows], stored.view(elements.dtype))
        own = part.rows if part.format.group == -1 else part.format.group_out
        scale = scale.reshape(-(-part.rows // own), to.scales.shape[1])
        if own != high:
            scale = scale.repeat_interleave(own, 0)[: part.rows]
        to.scales[at // high : at // high + scale.shape[0]].copy_(scale)
        if to.fixed is not None:
            torch.maximum(to.fixed, part.tensors["activation_scale"].float().reshape(1).to(to.fixed), out=to.fixed)
        at += part.rows
