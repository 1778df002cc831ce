"""Blocks as files store them (ggml's, and MXFP4), rearranged for the kernels that read packed weights.

Nothing is rounded. Numbers, scales and the scales of scales go to arrays of their own; ``jit/packed.py`` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

import torch

from evener.contracts.quant import BLOCKS, MXFP4, WeightPart, block_format

#: Columns of a span with one unit.
UNIT = 128
#: Rows that share a table of 16 numbers, and words of 32 bits that stand for it (``tables.table_words``).
TABLE_ROWS = 32


class PackedForm(NamedTuple):
    """How a packed matrix is stored, as the kernels' constants.

    Attributes:
        kind: bits of a number ("q2" to "q8"), or "e2m1", or "table" for numbers of a table of 16.
        style: what the words of scales mean; see ``_pair``, ``_quad`` and ``_spread`` in ``jit/packed.py``.
        group: columns that share a scale.
        zero: what is subtracted from every number.
        units: a span has 128 times so many columns.
        bf16: 16-bit numbers in the words are bfloat16, not float16.
    """

    kind: str
    style: str
    group: int
    zero: int = 0
    units: int = 2
    bf16: bool = False

    def stages(self, most: int, ptx: bool) -> int:
        """Stages of a launch. Without PTX, numbers of a table go through shared memory, which has no room for two."""
        return 1 if self.kind == "table" and not ptx else most

    def constants(self, dtype: torch.dtype, ptx: bool) -> dict[str, str | int | bool]:
        """Arguments of the kernels. ``dtype``: that of x, or of the numbers made; ``ptx``: the device takes PTX of
        compute capability 8.0."""
        own = {torch.bfloat16: 128, torch.float16: 1024}.get(dtype, 0)
        fast = ptx and own > 0 and (self.kind not in ("e2m1", "table") or dtype is torch.bfloat16)
        added = 0 if self.kind in ("q8", "e2m1", "table") else own if fast else -self.zero
        return {
            "KIND": self.kind, "STYLE": self.style, "GROUP": self.group, "ZERO": self.zero, "BF16": self.bf16,
            "UNITS": self.units, "LOW": self.low, "HIGH": self.high, "WORDS": self.words, "ADDED": added, "PTX": fast,
        }  # fmt: skip

    @property
    def columns(self) -> int:
        """Columns of a span."""
        return UNIT * self.units

    @property
    def low(self) -> int:
        """Elements of a row's span in ``low``, 16 bits each."""
        return self.columns * {"q8": 4, "q2": 1, "q3": 1}.get(self.kind, 2) // 8

    @property
    def high(self) -> int:
        """Elements of a row's span in ``high``, of ``high_dtype``; 0: there is none."""
        return self.columns // 8 if self.kind in ("q3", "q5", "q6") else 0

    @property
    def high_dtype(self) -> torch.dtype:
        """Eight tiles have one bit each, or two."""
        return torch.int16 if self.kind == "q6" else torch.uint8

    @property
    def words(self) -> int:
        """Words of scales of a row's span."""
        groups = max(1, self.columns // self.group)
        each = {"pair": 4, "zero": 4, "float": 4, "half": 2, "super": 2}.get(self.style, 1)
        return -(-groups * each // 4)

    def tops(self, rows: int, columns: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of what belongs to more than a group: what all scales of a row's span, or of a row, are
        multiplied with, and the tables of rows; None: there is nothing."""
        if self.kind == "table":
            return (-(-rows // TABLE_ROWS), TABLE_ROWS), torch.int32
        if self.style == "e4m3":
            return (1, rows), torch.float32
        kind = {"super": torch.int32, "least": torch.int32, "signed": torch.float16}.get(self.style)
        return None if kind is None else ((self.spans(columns), rows), kind)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix."""
        shape, kind = self.tops(rows, columns) or ((0,), torch.int32)
        span = 2 * self.low + self.high * self.high_dtype.itemsize + 4 * self.words
        return rows * self.spans(columns) * span + prod(shape) * kind.itemsize

    def spans(self, columns: int) -> int:
        """Spans of a row, the last of which may have less than its columns."""
        return -(-columns // self.columns)


#: Forms of the block formats; of those with blocks of 32 columns, ``units`` depends on the row.
FORMS: Mapping[str, PackedForm] = {
    "q4_0": PackedForm("q4", "half", 32, 8), "q4_1": PackedForm("q4", "pair", 32),
    "q5_0": PackedForm("q5", "half", 32, 16), "q5_1": PackedForm("q5", "pair", 32),
    "q8_0": PackedForm("q8", "half", 32), "q2_k": PackedForm("q2", "least", 16),
    "q3_k": PackedForm("q3", "signed", 16, 4), "q4_k": PackedForm("q4", "super", 32),
    "q5_k": PackedForm("q5", "super", 32), "q6_k": PackedForm("q6", "signed", 16, 32),
    MXFP4.storage: PackedForm("e2m1", "power", 32),
}  # fmt: skip


class Pieces(NamedTuple):
    """Rows of a packed matrix: int16 [rows, spans, low], [rows, spans, high] of ``PackedForm.high_dtype``, int32 [rows,
    spans, words], and tops [rows, spans] as int32 or float16, of factors float32 [rows, 1], of tables int32 [32]; None
    where a form has none."""

    low: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    tops: torch.Tensor | None


def fitting_units(columns: int, kind: str, group: int) -> int:
    """Units of a span: as many as do not make a row longer than it must be."""
    if kind in ("q2", "q3", "q5", "q6") or group > UNIT:
        return 2
    return 2 if -(-columns // UNIT) % 2 == 0 else 1


def block_form(part: WeightPart) -> PackedForm | str:
    """The form of a part in blocks, or why there is none."""
    storage = part.format.storage
    form = FORMS.get(storage)
    if form is None or part.format != (MXFP4 if storage == MXFP4.storage else block_format(storage)):
        return f"does not know the format {storage}"
    if part.columns % part.format.group:
        return f"{part.columns} columns are not a multiple of the block size of {storage}, {part.format.group}"
    return form._replace(units=fitting_units(part.columns, form.kind, form.group))


def block_pieces(part: WeightPart, form: PackedForm, first: int, stop: int, device: torch.device) -> Pieces:
    """Rows ``first`` to ``stop`` of a part with tensors.

    Raises:
        ValueError: its tensors do not have the dtype and the shape of its format.
    """
    stored, storage = part.tensors["weight"], part.format.storage
    if storage == MXFP4.storage:
        count, scale = part.columns // 32, part.tensors["scale"]
        _expect(part, stored, (part.rows, count, 16))
        _expect(part, scale, (part.rows, count))
        data, scale = stored[first:stop].to(device), scale[first:stop].to(device)
        numbers = torch.stack((data & 15, data >> 4), -1).flatten(1)
        return Pieces(low_bits(numbers, form), None, scale_words(scale, form), None)
    elements, nbytes = BLOCKS[storage]
    count = part.columns // elements
    _expect(part, stored, (part.rows, count * nbytes))
    blocks = stored[first:stop].to(device).reshape(stop - first, count, nbytes)
    return _REARRANGED[storage](blocks, form)


def _expect(part: WeightPart, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not torch.uint8 or tuple(tensor.shape) != shape:
        raise ValueError(f"{part.name} is {tensor.dtype} {list(tensor.shape)}, not uint8 {list(shape)}")


def _spans(values: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """[rows, columns] of anything for each column to [rows, spans, columns of a span], with zeros behind the end."""
    spans = form.spans(values.shape[1])
    padded: torch.Tensor = torch.nn.functional.pad(values, (0, spans * form.columns - values.shape[1]))
    return padded.reshape(len(values), spans, -1)


def low_bits(numbers: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """uint8 [rows, columns] to ``Pieces.low``, for four and eight bits; further bits are ignored."""
    spans = _spans(numbers, form)
    if form.kind == "q8":
        return _words_of(spans)
    first, second = spans.unflatten(2, (2 * form.units, 2, 32)).unbind(3)
    return _words_of(((first & 15) | (second & 15) << 4).flatten(2))


def _words_of(data: torch.Tensor) -> torch.Tensor:
    """Bytes of tiles [rows, spans, 64 * n] to words [rows, spans, 32 * n]: of each two tiles, the first has the lower
    halves."""
    pairs = data.unflatten(2, (-1, 2, 32)).transpose(3, 4).contiguous()
    words: torch.Tensor = pairs.flatten(2).view(torch.int16)
    return words


def _fifth_bits(numbers: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """uint8 [rows, columns] to ``Pieces.high`` for one bit."""
    bits = (_spans(numbers, form) >> 4 & 1).unflatten(2, (8, 32))
    place = torch.arange(8, dtype=torch.uint8, device=numbers.device)[:, None]
    found: torch.Tensor = (bits << place).sum(2, dtype=torch.uint8)
    return found


def scale_words(values: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """Scales of a row's groups, [rows, groups, …], to ``Pieces.scales``, with zeros behind the end."""
    # With one group, torch calls a transposed tensor contiguous, whose last stride is the number of rows.
    data = values.reshape(*values.shape[:2], -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    each = max(1, form.columns // form.group)
    spans = -(-data.shape[1] // each)
    data = torch.nn.functional.pad(data, (0, 0, 0, spans * each - data.shape[1])).reshape(len(data), spans, -1)
    return torch.nn.functional.pad(data, (0, 4 * form.words - data.shape[2])).view(torch.int32)


def _bytes(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    return blocks[..., start:stop].clone().view(dtype)


def _legacy(fifth: bool, least: bool) -> Callable[[torch.Tensor, PackedForm], Pieces]:
    """Q4_0, Q4_1, Q5_0, Q5_1: blocks of 32; the first 16 numbers are in lower halves of bytes."""

    def rearranged(blocks: torch.Tensor, form: PackedForm) -> Pieces:
        pairs = blocks[..., -16:]
        numbers = torch.cat((pairs & 15, pairs >> 4), -1)
        if fifth:
            place = torch.arange(8, dtype=torch.uint8, device=blocks.device)
            numbers |= ((blocks[..., -20:-16, None] >> place) & 1).flatten(-2) << 4
        numbers = numbers.flatten(1)
        scales = blocks[..., : 4 if least else 2]
        high = _fifth_bits(numbers, form) if fifth else None
        return Pieces(low_bits(numbers, form), high, scale_words(scales, form), None)

    return rearranged


def _q8_0(blocks: torch.Tensor, form: PackedForm) -> Pieces:
    return Pieces(low_bits(blocks[..., 2:].flatten(1), form), None, scale_words(blocks[..., :2], form), None)


def _q2_k(blocks: torch.Tensor, form: PackedForm) -> Pieces:
    tops = _bytes(blocks, 80, 84, torch.int32)[..., 0]
    return Pieces(_words_of(blocks[..., 16:80]), None, _bytes(blocks, 0, 16, torch.int32), tops)


def _q3_k(blocks: torch.Tensor, form: PackedForm) -> Pieces:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    low = torch.cat((low & 15, low >> 4), -1)
    high = torch.cat([(high >> (2 * i)) & 3 for i in range(4)], -1)
    scales = (low | high << 4).view(torch.int8) - 32
    tops = _bytes(blocks, 108, 110, torch.float16)[..., 0]
    return Pieces(_words_of(blocks[..., 32:96]), blocks[..., :32], scales.view(torch.int32), tops)


def _q4_k_or_q5_k(fifth: bool) -> Callable[[torch.Tensor, PackedForm], Pieces]:
    def rearranged(blocks: torch.Tensor, form: PackedForm) -> Pieces:
        first, second, rest = blocks[..., 4:16].split(4, -1)
        scales = torch.cat((first & 63, (rest & 15) | first >> 6 << 4), -1)
        minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
        both = torch.stack((scales, minima), -1).flatten(-2).view(torch.int32)
        high = blocks[..., 16:48] if fifth else None
        return Pieces(_words_of(blocks[..., -128:]), high, both, _bytes(blocks, 0, 4, torch.int32)[..., 0])

    return rearranged


def _q6_k(blocks: torch.Tensor, form: PackedForm) -> Pieces:
    first, second = blocks[..., :128].unflatten(-1, (2, 2, 32)).unbind(-2)
    low = torch.stack(((first & 15) | (second & 15) << 4, first >> 4 | (second & 240)), -2).flatten(-3)
    tops = _bytes(blocks, 208, 210, torch.float16)[..., 0]
    return Pieces(_words_of(low), _words_of(blocks[..., 128:192]), _bytes(blocks, 192, 208, torch.int32), tops)


_REARRANGED: Mapping[str, Callable[[torch.Tensor, PackedForm], Pieces]] = {
    "q4_0": _legacy(False, False), "q4_1": _legacy(False, True), "q5_0": _legacy(True, False),
    "q5_1": _legacy(True, True), "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k_or_q5_k(False),
    "q5_k": _q4_k_or_q5_k(True), "q6_k": _q6_k,
}  # fmt: skip
