"""Weights in safetensors files, mapped. Imports torch only to read one."""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Extent, WeightFile
from evener.errors import CheckpointError
from evener_formats.read_ahead import FileRange, ReadAhead, weight_files

if TYPE_CHECKING:
    import torch

#: safetensors' dtype codes, and torch's names.
DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
}  # fmt: skip
#: Of these a byte holds more than one number, or a part of one.
_PACKED = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
#: After so many bytes of tensors, the pages of the file are given back.
_GIVE_BACK = 32 << 20
#: More axes than any weight has; a hostile file may have thousands, to make messages long.
MAX_RANK = 16


class SafetensorsFile(WeightFile):
    """One file.

    Raises:
        CheckpointError: its header is broken, or does not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text, self._entries = _read_header(path)
        self._data, self._header = len(text), hashlib.sha256(text).digest()
        self.headers = {n: (DTYPES[each["dtype"]], tuple(each["shape"])) for n, each in self._entries.items()}
        self._map: mmap.mmap | None = None
        self._given = 0

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        if name not in self._entries:
            raise CheckpointError(f"cannot read {name!r} from {self.path}: it has no such tensor; fetch the file again")
        self._ahead.used(name)
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        if entry["dtype"] in _PACKED:
            return self._by_library(name)
        dtype = getattr(torch, DTYPES[entry["dtype"]])
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        mapped = self._mapped(end - begin)
        if self._data + end > len(mapped):
            raise CheckpointError(f"cannot read {name!r} from {self.path}: the file was cut; fetch it again")
        found = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=self._data + begin)
        return found.view(dtype).view(entry["shape"])

    def _mapped(self, nbytes: int) -> mmap.mmap:
        """The file in memory, of which ``nbytes`` are asked for. From time to time all its pages are given back."""
        try:
            if self._map is None:
                with self.path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                # The file may have been replaced since its header was read, and its numbers lie elsewhere now.
                if hashlib.sha256(mapped[: self._data]).digest() != self._header:
                    raise CheckpointError(f"cannot read {self.path}: another file is there than before; start again")
                self._map = mapped
            self._given += nbytes
            if self._given > _GIVE_BACK:
                _give_back(self._map)
                self._given = nbytes
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}; fetch the file again") from error
        return self._map

    def _by_library(self, name: str) -> torch.Tensor:
        """A tensor of a dtype with several numbers in a byte."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name!r} from {self.path}: {error}; fetch the file again") from error

    def extent(self, name: str) -> Extent:
        self._ahead.used(name)
        return Extent(self.path, self._range(name).begin)

    def _range(self, name: str) -> FileRange:
        return FileRange(self.path, *(self._data + offset for offset in self._entries[name]["data_offsets"]))

    @cached_property
    def _ahead(self) -> ReadAhead:
        files = list(weight_files(self.path.parent)) if self.path.name.startswith("model") else []
        after = files[files.index(self.path) + 1 :] if self.path in files else []
        return ReadAhead({name: self._range(name) for name in self._entries}, after)

    def close(self) -> None:
        if (ahead := self.__dict__.pop("_ahead", None)) is not None:
            ahead.close()
        if self._map is not None:
            _give_back(self._map)
        self._map, self._given = None, 0


def _give_back(mapped: mmap.mmap) -> None:
    """Let go of the pages of a file that are in this process's memory: most tensors are copied and then not used again.
    Those that are used are there again at once, from the system's cache of the file."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """What comes before the data in the file, and the header's entry of each tensor.

    The library checks the header first: dtypes exist, and ranges fit the shapes and cover the rest of the file without
    gap or overlap. So a hostile file costs at most the reading of its header.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or does not fit its header.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", size := file.read(8))
            header: dict[str, Any] = json.loads(text := file.read(length))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot load {path}: {str(error)[:500]}; fetch the file again") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if len(entry["shape"]) > MAX_RANK:
            raise CheckpointError(
                f"cannot load {path}: {name[:100]!r} has {len(entry['shape']):,} axes; fetch the file again"
            )
    return size + text, header
