"""The header of a GGUF file, read and checked without touching a tensor. Torch-free.

A file consists of a magic number, counts, key-value pairs, tensor descriptions, padding, and the tensors' bytes. Every
count and length is compared with the rest of the file before it is used, so a malicious file costs no more than reading
its header.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.contracts.quant import BLOCKS
from evener.errors import CheckpointError

#: Blocks of 32 four-bit floats that begin with the exponent of their scale. It is none of ``BLOCKS``: such a tensor is
#: read as the two that the scheme "mxfp4" knows.
MXFP4 = "mxfp4"
#: Blocks that no kernel reads, with their elements and bytes: such a matrix is made float32 when it is read.
UNPACKED: Mapping[str, tuple[int, int]] = {
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82),
    "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq4_nl": (32, 18), "iq4_xs": (256, 136), "tq1_0": (256, 54),
    "tq2_0": (256, 66),
}  # fmt: skip
#: GGUF's tensor types: our name of the dtype or block format, elements per block, bytes per block.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("float32", 1, 4), 1: ("float16", 1, 2), 30: ("bfloat16", 1, 2), 28: ("float64", 1, 8), 24: ("int8", 1, 1),
    25: ("int16", 1, 2), 26: ("int32", 1, 4), 27: ("int64", 1, 8), 39: (MXFP4, 32, 17),
    **{number: (name, *{**BLOCKS, **UNPACKED}[name]) for number, name in
       {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k",
        14: "q6_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s",
        23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0"}.items()},
}  # fmt: skip

#: GGUF's value types: the code of ``array`` and ``struct`` for each. 7 is a bool, 8 a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
MAX_HEADER = 200_000_000
_MAX_RANK = 4
#: So many texts of a list are read at once.
_RUN = 1 << 15


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: dtype or block format, shape (rows first), its file, and its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """Key-value pairs (arrays of numbers as ``array.array``, of strings as lists), and tensors by GGUF's names."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


#: Headers that are in use, by the file's path and state: a front end and a worker in one process read the same file.
_OPEN: MutableMapping[tuple[object, ...], GgufHeader] = weakref.WeakValueDictionary()
#: Held while a header is read: whoever asks for the same one meanwhile waits for it.
_READING = threading.Lock()


def read_header(path: Path) -> GgufHeader:
    """Read the header of one file.

    Raises:
        CheckpointError: the file cannot be read or is truncated, or a count, type, shape or offset is wrong.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size, key = status.st_size, (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if size < 24:
                raise CheckpointError(f"cannot load {path}: it is truncated: it has {size} bytes; fetch the file again")
            with _READING:
                if (known := _OPEN.get(key)) is not None:
                    return known
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _OPEN.setdefault(key, _Reader(path, data, size).read())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 0
        self._end = min(size, MAX_HEADER)

    def read(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise self._bad("it does not begin with GGUF's magic number")
        version = self._number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            kind = "big-endian" if swapped else f"of version {version}"
            raise CheckpointError(f"cannot load {self._path}: it is {kind}; versions 2 and 3, little-endian, are read")
        tensors, pairs = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise self._bad(f"the key {key[:120]!r} occurs twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment is {alignment!r}, not a power of two")
        data = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, self._locate_tensors(infos, data, alignment))

    def _take(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise self._bad(f"its header needs {count:,} bytes at byte {self._at:,}, but {self._left():,} are left")
        self._at += count
        return self._data[self._at - count : self._at]

    def _left(self) -> int:
        return self._end - self._at

    def _number(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack(f"<{code}", self._take(size))[0]

    def _count(self, least: int) -> int:
        """A count of items that take at least ``least`` bytes each."""
        count: int = self._number("Q")
        if count * least > self._left():
            left = f"{self._left():,} bytes are left"
            raise self._bad(f"its header counts {count:,} items at byte {self._at:,}, but {left}")
        return count

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self._bad(f"the text at byte {self._at:,} is not UTF-8") from error

    def _texts(self, count: int) -> list[str]:
        """As ``_text``, ``count`` times; a vocabulary has hundreds of thousands, and calls would take most of the
        time. A run at a time: the places of all texts of a header could take five times its bytes."""
        found: list[str] = []
        with memoryview(self._data) as data:
            while len(found) < count and (run := self._run(data, min(_RUN, count - len(found)))):
                found += run
        # What could not be read: this says where.
        return found + [self._text() for _ in range(count - len(found))]

    def _run(self, data: memoryview, count: int) -> list[str]:
        """The next ``count`` texts; none, and nothing is taken, if one of them is cut off or not UTF-8."""
        first, at, left, length = self._at, 0, self._left(), struct.Struct("<Q").unpack_from
        places = [0]
        with data[first : self._end] as view:
            for _ in itertools.repeat(None, count):
                if at + 8 > left:
                    return []
                at += 8 + length(view, at)[0]
                places.append(at)
        if at > left:
            return []
        # Not of the map: a slice of that takes several times as long.
        run = self._data[first : first + at]
        try:
            texts = [run[begin + 8 : end].decode() for begin, end in itertools.pairwise(places)]
        except UnicodeDecodeError:
            return []
        self._at += at
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"))
        if kind not in _SCALARS:
            raise self._bad(f"a value at byte {self._at:,} has the unknown type {kind}")
        value = self._number(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self, kind: int) -> Any:
        if kind == _STRING:
            return self._texts(self._count(8))
        if kind not in _SCALARS:
            raise self._bad(f"an array at byte {self._at:,} has items of the unknown type {kind}")
        items = array(_SCALARS[kind])
        items.frombytes(self._take(self._count(items.itemsize) * items.itemsize))
        if sys.byteorder == "big":
            items.byteswap()
        return items

    def _tensor_info(self) -> tuple[str, list[int], int, int]:
        name, rank = self._text(), self._number("I")
        if rank > _MAX_RANK:
            raise self._bad(f"{name[:120]!r} has {rank:,} dimensions")
        shape = [self._number("Q") for _ in range(rank)]
        return name, shape, self._number("I"), self._number("Q")

    def _locate_tensors(
        self, infos: list[tuple[str, list[int], int, int]], data: int, alignment: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            shown = repr(name[:120])
            if name in tensors:
                raise self._bad(f"the tensor {shown} occurs twice")
            if kind not in TYPES:
                known = ", ".join(sorted(dtype for dtype, _, _ in TYPES.values()))
                raise CheckpointError(
                    f"cannot load {self._path}: {shown} has GGUF's tensor type {kind}, which is not supported ({known} "
                    "are); fetch the model in one of these"
                )
            dtype, elements, nbytes = TYPES[kind]
            total = 1
            for extent in shape:
                total *= extent
            if total >= 1 << 62 or (shape or [1])[0] % elements:
                raise self._bad(f"{shown} is {dtype} and has the impossible shape {shape[::-1]}")
            begin = data + offset
            end = begin + total // elements * nbytes
            if offset % alignment or end > self._size:
                raise self._bad(
                    f"{shown} lies at bytes {begin:,} to {end:,}, but the file has {self._size:,}"
                    + (f"; offsets must be multiples of {alignment}" if offset % alignment else "")
                )
            tensors[name] = GgufTensor(dtype, tuple(reversed(shape)), self._path, begin, end)
        at, last = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if tensor.begin < at:
                raise self._bad(f"{last!r} and {name[:120]!r} overlap")
            at, last = tensor.end, name[:120]
        return tensors

    def _bad(self, detail: str) -> CheckpointError:
        return CheckpointError(f"cannot load {self._path}: {detail}; fetch the file again")
