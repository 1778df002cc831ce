"""Weights whose parts differ in format, as the kernels see them: a segment for each part."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.quant import DTYPE_BYTES, PackedWeight, Packing, WeightPart
from evener_backend_cpu.huge_pages import Arena
from evener_backend_cpu.native_library import DTYPES, Blocks, Matrix, Native, Ordered, Segment, Stored
from evener_backend_cpu.screened import ScreenedMatrix

_PLAIN = 0
#: In place of a saved tensor that is not there: no weight has its shape.
MISSING = torch.empty(0, 0, 0)


class _Device(Protocol):
    threads: int

    @property
    def native(self) -> Native | Unavailable: ...


@dataclass(frozen=True)
class SegmentData:
    """Data of a ``SegmentPacking`` weight: its tensors, and the C structs that point to them."""

    tensors: tuple[torch.Tensor, ...]
    struct: Blocks
    parts: tuple[Stored | Ordered, ...]


class PackedPart(NamedTuple):
    """One part: its number in ``Segment.kind``, its tensors, and the C struct that describes them; None: the first
    tensor is all that the kernel needs."""

    kind: int
    tensors: tuple[torch.Tensor, ...]
    struct: Stored | Ordered | None = None


def addresses(weight: PackedWeight) -> tuple[int | None, int | None]:
    """Addresses of a plain matrix and of the struct of one in segments; one of them is None."""
    if isinstance(weight.data, SegmentData):
        return None, ctypes.addressof(weight.data.struct)
    tensor: torch.Tensor = weight.data.values if isinstance(weight.data, ScreenedMatrix) else weight.data
    assert tensor.is_contiguous(), "the plain packing returns contiguous weights"
    return tensor.data_ptr(), None


def matrices(weight: PackedWeight) -> ctypes.Array[Matrix]:
    """The matrices of a stack, by index; valid as long as the weight exists."""
    found = (Matrix * weight.shape[0])()
    for index in range(weight.shape[0]):
        one = weight.data[index]
        found[index] = Matrix(*addresses(PackedWeight(weight.layout, weight.shape[1:], one, 0)))
    return found


class SegmentPacking(Packing):
    """Packs parts one after another, in memory from ``arena`` if there is one; plain parts stay plain."""

    def __init__(self, device: _Device, arena: Arena | None = None) -> None:
        self._device, self._arena = device, arena

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        if isinstance(self._device.native, Unavailable):
            return self._device.native.reason
        if dtype not in DTYPES:
            return f"computes in float32 and bfloat16, not {dtype}"
        reasons = [self._refusal(part) for part in parts if not part.format.plain]
        return next((reason for reason in reasons if reason), None) if reasons else "every part is plain"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(
            part.rows * part.columns * int(DTYPE_BYTES[dtype]) if part.format.plain else self._quantized_bytes(part)
            for part in parts
        )

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        packed = [
            PackedPart(_PLAIN, (part.tensors["weight"].to(getattr(torch, dtype)).contiguous(),))
            if part.format.plain
            else self._pack_part(part)
            for part in parts
        ]
        return self._joined(parts, packed)

    def saved(self, packed: PackedWeight) -> Sequence[torch.Tensor]:
        one = packed.data if isinstance(packed.data, tuple) else (packed.data,)
        return [tensor for data in one for tensor in data.tensors]

    def restored(
        self, tensors: Sequence[torch.Tensor], parts: Sequence[WeightPart], count: int, dtype: str, device: torch.device
    ) -> PackedWeight:
        left, made = iter(tensors), []
        for _ in range(count or 1):
            packed = [
                PackedPart(_PLAIN, (self._kept(next(left, MISSING), (p.rows, p.columns), getattr(torch, dtype)),))
                if p.format.plain
                else self._restored_part(p, left)
                for p in parts
            ]
            made.append(self._joined(parts, packed))
        if next(left, None) is not None:
            raise ValueError("there are more tensors than such a weight has")
        if not count:
            return made[0]
        data, nbytes = tuple(p.data for p in made), sum(p.nbytes for p in made)
        return PackedWeight(self.layout, (count, *made[0].shape), data, nbytes, made[0].formats)

    def _joined(self, parts: Sequence[WeightPart], packed: Sequence[PackedPart]) -> PackedWeight:
        """The weight of packed parts."""
        segments, first = (Segment * len(parts))(), 0
        for segment, part, (kind, tensors, struct) in zip(segments, parts, packed, strict=True):
            segment.kind, segment.first, segment.rows = kind, first, part.rows
            segment.data = tensors[0].data_ptr() if struct is None else ctypes.addressof(struct)
            first += part.rows
        kept = tuple(tensor for one in packed for tensor in one.tensors)
        structs = tuple(one.struct for one in packed if one.struct is not None)
        data = SegmentData(kept, Blocks(len(parts), segments), structs)
        formats = tuple(part.format for part in parts)
        return PackedWeight(self.layout, (first, parts[0].columns), data, sum(t.nbytes for t in kept), formats)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype) if self._arena is None else self._arena.take(shape, dtype)

    def _kept(self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that was saved: itself, mapped from its file, or copied into the arena.

        Raises:
            ValueError: it has another shape or dtype.
        """
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ValueError(f"a tensor is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        return tensor if self._arena is None else self._arena.take(shape, dtype).copy_(tensor)

    @abstractmethod
    def _refusal(self, part: WeightPart) -> str | None:
        """Why a quantized part cannot be packed; None if it can."""

    @abstractmethod
    def _quantized_bytes(self, part: WeightPart) -> int:
        """Bytes of a quantized part, once packed."""

    @abstractmethod
    def _pack_part(self, part: WeightPart) -> PackedPart:
        """A quantized part.

        Raises:
            ValueError: its tensors do not have the dtype and the shape of its format.
        """

    @abstractmethod
    def _restored_part(self, part: WeightPart, tensors: Iterator[torch.Tensor]) -> PackedPart:
        """A quantized part as ``_pack_part`` made it, from its tensors, which it takes from the front.

        Raises:
            ValueError: they are not those of such a part.
        """
