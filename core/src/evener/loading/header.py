"""Headers of safetensors files, read and checked without touching a tensor. Torch-free.

A file is 8 bytes of header length, a JSON header, then the tensors' bytes without gap or overlap. Nothing of the header
is believed before it was checked against the file's size, so a hostile file costs at most the reading of its header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import CheckpointError

#: safetensors' dtype codes: our name and bits an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8), "U64": ("uint64", 64),
    "U32": ("uint32", 32), "U16": ("uint16", 16), "U8": ("uint8", 8), "BOOL": ("bool", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "C64": ("complex64", 64), "F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
}  # fmt: skip

#: The format's own bound on a header.
MAX_HEADER = 100_000_000
MAX_RANK = 16


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: dtype name ("bfloat16"), shape, the file that holds it, and its byte range in the file's data."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by name.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header lies about types, shapes or offsets.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _bad(path, f"it is cut short: it has {size:,} bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                raise _bad(path, f"it is cut short: it has {size:,} bytes, but its header alone should have {length:,}")
            if length > MAX_HEADER:
                raise _bad(path, f"its header says that it has {length:,} bytes; the format allows {MAX_HEADER:,}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is not valid JSON ({_first_line(error)})") from error
    if not isinstance(header, dict):
        raise _bad(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    _check_ranges(path, entries, size - 8 - length)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _bad(path, f"its entry for {_show(name)} is not a dtype, a shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise _bad(path, f"{_show(name)} has the unknown dtype {_show(code)}")
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise _bad(path, f"{_show(name)} has the impossible shape {_show(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"{_show(name)} has the impossible data_offsets {_show(offsets)}")
    dtype, bits = DTYPES[code]
    if math.prod(shape) * bits != (offsets[1] - offsets[0]) * 8:
        raise _bad(
            path,
            f"{_show(name)} is {code} {_show(shape)}, which is not the {offsets[1] - offsets[0]:,} bytes that it names",
        )
    return TensorEntry(dtype, tuple(shape), path, offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_ranges(path: Path, entries: Mapping[str, TensorEntry], data: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > data:
            raise _bad(
                path, f"it is cut short: {_show(name)} ends at byte {entry.end:,} of the data, which has {data:,}"
            )
        if entry.begin != at:
            raise _bad(
                path,
                f"{_show(name)} begins at byte {entry.begin:,}, where {at:,} was due: ranges overlap or leave a hole",
            )
        at = entry.end
    if at != data:
        raise _bad(path, f"{data - at:,} bytes at its end belong to no tensor")


def _bad(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"cannot load {path}: {detail}; fetch the file again")


def _show(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def _first_line(error: BaseException) -> str:
    return _show(str(error).splitlines()[0] if str(error) else type(error).__name__).strip("'\"")
