"""Reads one tensor that ``torch.save`` has written, without torch and without running what the file says.

Such a file is a ZIP archive: ``data.pkl`` describes the tensor in pickle's opcodes, ``data/0`` has its numbers. Only
the opcodes that torch writes for one plain tensor are known here; whatever else stands there is refused. The format:
PyTorch, "Serialization semantics", and ``torch.serialization``.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Bytes of the description: torch writes about 200.
_MOST_PICKLE = 4096
#: torch's kinds of storage, and how their numbers are stored.
_STORAGE: Mapping[str, str] = {
    "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2", "DoubleStorage": "<f8",
}  # fmt: skip
_REBUILD, _NO_HOOKS = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"


class _RefusedError(ValueError):
    """The file has something that is not read here."""


@dataclass(frozen=True)
class _Tensor:
    storage: tuple[str, str]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_matrix(data: bytes, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """The tensor as a float32 matrix [n, columns] of finite numbers; n is at least 1 and at most ``rows``.

    Raises:
        ValueError: it is something else; the message says what, as the end of a sentence about it.
    """
    described, numbers = _parts(data)
    kind, item = described.storage[0], np.dtype(_STORAGE[described.storage[0]])
    shape = described.shape
    if len(shape) != 2 or shape[1] != columns or not 1 <= shape[0] <= rows:
        raise ValueError(f"it has the shape {list(shape)}; this model takes [n, {columns}] with n from 1 to {rows}")
    count = len(numbers) // item.itemsize
    # A stride over a single row or column is not used, and may be any number.
    down, right = (stride if size > 1 else 0 for size, stride in zip(shape, described.strides, strict=True))
    last = described.offset + (shape[0] - 1) * down + (shape[1] - 1) * right
    # A few numbers that are repeated would make a small request a large matrix.
    if min(described.offset, down, right) < 0 or last >= count or shape[0] * shape[1] > count:
        raise ValueError("its shape does not fit its numbers; save the tensor after tensor.contiguous()")
    flat = np.frombuffer(numbers, dtype=item, count=count)[described.offset :]
    found = np.lib.stride_tricks.as_strided(flat, shape, (down * item.itemsize, right * item.itemsize))
    if kind == "BFloat16Storage":  # the upper half of a float32
        return _finite((found.astype(np.uint32) << 16).view(np.float32))
    return _finite(found.astype(np.float32))


def _finite(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not np.isfinite(matrix).all():
        raise ValueError("it has numbers that are not finite")
    return np.ascontiguousarray(matrix)


def _parts(data: bytes) -> tuple[_Tensor, bytes]:
    """What the archive says of the tensor, and the bytes of its storage."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {each.filename.partition("/")[2]: each for each in archive.infolist()}
            if any(each.compress_type != zipfile.ZIP_STORED or each.file_size > len(data) for each in records.values()):
                raise _RefusedError("it is a compressed archive, which torch.save does not write")
            if records["data.pkl"].file_size > _MOST_PICKLE:
                raise _RefusedError("it holds more than one tensor")
            described = _described(archive.read(records["data.pkl"]))
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise _RefusedError("its numbers are not little-endian")
            return described, archive.read(records[f"data/{described.storage[1]}"])
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise _RefusedError("it is not a tensor that torch.save has written") from error


def _described(pickle: bytes) -> _Tensor:
    stack: list[Any] = []
    try:
        for opcode, value, _ in pickletools.genops(pickle):
            if opcode.name in _PUSHED:
                stack.append(value)
            elif opcode.name in _CONSTANTS:
                stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _CHANGES:
                _CHANGES[opcode.name](stack)
            elif opcode.name not in _WITHOUT_EFFECT:
                raise _RefusedError(f"it has the opcode {opcode.name}, which no plain tensor needs")
        (found,) = stack
    except _RefusedError:
        raise
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise _RefusedError("its description is damaged") from error
    if not isinstance(found, _Tensor):
        raise _RefusedError("it holds something else than one tensor")
    return found


def _tuple_of_marked(stack: list[Any]) -> None:
    start = len(stack) - 1 - stack[::-1].index(_MARK)
    stack[start:] = [tuple(stack[start + 1 :])]


def _tuple_of(count: int) -> Callable[[list[Any]], None]:
    def change(stack: list[Any]) -> None:
        if len(stack) < count:
            raise IndexError(count)
        stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]

    return change


def _storage(stack: list[Any]) -> None:
    """A reference to a storage: its kind, and its name in the archive."""
    word, kind, name, *_ = stack.pop()
    kind = kind.removeprefix("torch ")
    if word != "storage" or kind not in _STORAGE or not name.isalnum():
        raise _RefusedError(f"it is of {kind[:40]!r}; send a tensor of float32, float16, bfloat16 or float64")
    stack.append((kind, name))


def _call(stack: list[Any]) -> None:
    arguments, name = stack.pop(), stack.pop()
    if name == _NO_HOOKS and arguments == ():
        stack.append(None)
        return
    if name != _REBUILD:
        raise _RefusedError("it holds something else than one plain tensor")
    storage, offset, shape, strides, *_ = arguments
    if len(shape) != len(strides) or not all(type(each) is int for each in (offset, *shape, *strides)):
        raise TypeError(arguments)
    stack.append(_Tensor(storage, offset, tuple(shape), tuple(strides)))


_MARK = object()
_PUSHED = {"GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS: Mapping[str, Any] = {"MARK": _MARK, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CHANGES: Mapping[str, Callable[[list[Any]], None]] = {
    "TUPLE": _tuple_of_marked, "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2), "TUPLE3": _tuple_of(3),
    "BINPERSID": _storage, "REDUCE": _call,
}  # fmt: skip
#: Nothing that torch writes for one tensor is read from the memo.
_WITHOUT_EFFECT = {"PROTO", "BINPUT", "LONG_BINPUT", "STOP", "FRAME"}
