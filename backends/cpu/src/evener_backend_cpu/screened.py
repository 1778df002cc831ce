"""The head's weight for the search of the largest logit: as it is, and as codes of four bits that are read instead.

The code of a weight is a whole number q from 0 to 15. A weight w of row i and column j is about

    mean[j] + spread[j] * scale[i] * (q - 7.5 - dither[j])

The means of the columns change every logit by the same number. ``spread`` makes columns alike, so that one scale serves
a row. ``dither`` is drawn at random from -1/2 to 1/2, once for each column, and added before a number is rounded to its
code. Then the error of a weight, in units of ``spread * scale``, is evenly distributed from -1/2 to 1/2, whatever the
weight is, and independent of those of other columns (subtractive dither: Schuchman 1964). So the error of a logit is a
sum of such numbers times ``spread * x``, and it is more than ``t * scale[i]`` with a probability of at most
``exp(-6 t² / Σ (spread x)²)``, since no moment of an even distribution of length 1 is larger than that of a Gaussian of
variance 1/12. ``native/screened.h`` uses that, and adds bounds for all that is rounded.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener.ops.reference.linear import PLAIN
from evener_backend_cpu.huge_pages import Arena
from evener_backend_cpu.native_library import Native, Screened

LAYOUT = "cpu.screened"
#: Columns are a multiple of this, and no more than that.
UNIT, MOST_COLUMNS = 64, 16_384
#: Bytes that a row has beside its codes, and a column: the scale; mean, spread and dither.
_ROW_BYTES, _COLUMN_BYTES = 4, 12


class ScreenedMatrix(NamedTuple):
    """A matrix and its codes.

    Attributes:
        values: bfloat16 [rows, columns], the weight as it is.
        codes: uint8 [rows, columns / 2]. Byte k has column k in its lower half, and column k + columns / 2 in the upper
            one.
        scales: float32 [rows].
        columns: float32 [3, columns]: mean, spread and dither.
        struct: points to these.
    """

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    columns: torch.Tensor
    struct: Screened

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(each.nbytes for each in self if isinstance(each, torch.Tensor))


class _Device(Protocol):
    threads: int
    plain: Packing

    @property
    def native(self) -> Native | Unavailable: ...


class ScreenedPacking(Packing):
    """Packs matrices in bfloat16 with their codes, in memory from ``arena`` if there is one. The matrix itself lies
    where the device puts plain ones."""

    layout = LAYOUT

    def __init__(self, device: _Device, arena: Arena | None = None) -> None:
        self._device, self._arena = device, arena

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if isinstance(self._device.native, Unavailable):
            return self._device.native.reason
        if reason := PLAIN.supports(parts, dtype):
            return reason
        if dtype != "bfloat16":
            return f"holds bfloat16, not {dtype}"
        columns = parts[0].columns
        if columns % UNIT or columns > MOST_COLUMNS:
            return f"holds multiples of {UNIT} columns up to {MOST_COLUMNS}, not {columns}"
        return None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        rows, columns = sum(part.rows for part in parts), parts[0].columns
        return PLAIN.nbytes(parts, dtype) + rows * (columns // 2 + _ROW_BYTES) + columns * _COLUMN_BYTES

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        if self._arena is None or len(parts) > 1:
            return self._coded(self._device.plain.pack(parts, dtype, device))
        return self._copied(PLAIN.pack(parts, dtype, device), self._arena)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return self._arena is None and PLAIN.keeps_storage(parts)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        """The matrix alone: codes are made as fast as they are read."""
        return (packed.data.values,)

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        if count:
            raise ValueError(f"the packing {self.layout} holds one matrix, not {count}")
        plain = PLAIN.restored(tensors, parts, 0, dtype, device)
        return self._coded(plain) if self._arena is None else self._copied(plain, self._arena)

    def _copied(self, plain: PackedWeight, arena: Arena) -> PackedWeight:
        """The weight in the device's memory."""
        source = plain.data
        return self._coded(replace(plain, data=arena.take(source.shape, source.dtype)), source)

    def _coded(self, plain: PackedWeight, source: torch.Tensor | None = None) -> PackedWeight:
        """The weight with codes. ``source``: what to copy into it before."""
        native, values = self._device.native, plain.data
        assert isinstance(native, Native), "packings are used after supports"
        rows, columns = values.shape
        codes = self._room((rows, columns // 2), torch.uint8)
        scales = self._room((rows,), torch.float32)
        of_columns = torch.empty(3, columns)
        struct = Screened(*(t.data_ptr() for t in (values, codes, scales, *of_columns)), rows, columns)
        native.code_rows(ctypes.addressof(struct), None if source is None else source.data_ptr(), self._device.threads)
        data = ScreenedMatrix(values, codes, scales, of_columns, struct)
        return PackedWeight(self.layout, plain.shape, data, data.nbytes, plain.formats)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype) if self._arena is None else self._arena.take(shape, dtype)


def certainty(chance: float) -> float:
    """How many times the root of ``Σ (spread x)²`` the error of a logit is at most, in scales of its row, but for a
    probability of ``chance``."""
    return math.sqrt(math.log(1 / chance) / 6)


def decoded(matrix: ScreenedMatrix) -> torch.Tensor:
    """float32 [rows, columns]: what the codes stand for."""
    mean, spread, dither = matrix.columns
    whole = torch.cat((matrix.codes & 15, matrix.codes >> 4), dim=1).float()
    numbers: torch.Tensor = (whole - 7.5 - dither) * (matrix.scales[:, None] * spread) + mean
    return numbers
