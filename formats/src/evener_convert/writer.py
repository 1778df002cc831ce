"""A weight file that is written tensor by tensor, and continued where an interrupted process left it. Its beginning is
given: that of a safetensors file is made here."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from evener.errors import CheckpointError
from evener_convert.pieces import Piece, Read
from evener_formats.safetensors_files import DTYPES

_CODES: Mapping[str, str] = {name: code for code, name in DTYPES.items()}
#: Bytes after which the written tensors are made durable and noted, so that the work can be continued.
_DURABLE = 64 << 20


@dataclass(frozen=True)
class WeightFile:
    """A file that is going to be written.

    Attributes:
        name: of the file.
        header: its bytes before the first tensor.
        pieces: what follows.
        alignment: each piece ends at a multiple of so many bytes behind the header, after zeros.
    """

    name: str
    header: bytes
    pieces: Sequence[Piece]
    alignment: int = 1

    @classmethod
    def safetensors(cls, name: str, pieces: Sequence[Piece]) -> WeightFile:
        """A safetensors file."""
        return cls(name, file_header(pieces), pieces)

    @property
    def ends(self) -> list[int]:
        """Where each piece ends in the file."""
        ends, at = [], len(self.header)
        for piece in self.pieces:
            nbytes = sum(each.nbytes for each in piece.stored.values())
            at += nbytes + -nbytes % self.alignment
            ends.append(at)
        return ends

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.ends[-1] if self.pieces else len(self.header)


def write_file(folder: Path, planned: WeightFile, read: Read, written: Callable[[int], None]) -> None:
    """Write the file ``planned`` into ``folder``, or the rest of it, if a part of the same file is there.

    Args:
        read: reads a tensor of the source.
        written: called with each number of bytes that were written, or found.

    Raises:
        CheckpointError: a tensor differs from its announced shape or dtype, or cannot be stored.
        OSError: the disk is full.
    """
    path, header, pieces, ends = folder / planned.name, planned.header, planned.pieces, planned.ends
    with path.open("r+b" if path.exists() else "x+b") as file:
        done = _complete(file.read(len(header)), header, _noted(path), ends)
        start = ends[done - 1] if done else len(header)
        file.seek(0)
        if not done:
            file.truncate(0)
            file.write(header)
        file.seek(start)
        file.truncate(start)
        written(start)
        durable = start
        for piece, end in zip(pieces[done:], ends[done:], strict=True):
            for tensor in _checked(piece, piece.make(read)):
                if tensor.numel():
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.write(bytes(end - file.tell()))
            written(end - start)
            start = end
            if end - durable >= _DURABLE or end == ends[-1]:
                file.flush()
                os.fsync(file.fileno())
                _note(path, end)
                durable = end
        if not pieces:
            os.fsync(file.fileno())


def file_header(pieces: Sequence[Piece]) -> bytes:
    """The first bytes of the file: the length of its header, and the header."""
    entries, at = {}, 0
    for piece in pieces:
        for name, stored in piece.stored.items():
            if stored.dtype not in _CODES:
                raise CheckpointError(f"{name} is {stored.dtype}, which safetensors cannot store")
            offsets = [at, at + stored.nbytes]
            entries[name] = {"dtype": _CODES[stored.dtype], "shape": list(stored.shape), "data_offsets": offsets}
            at += stored.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def forget_notes(folder: Path) -> None:
    """Remove the notes about how far the files of ``folder`` were written."""
    for note in (*folder.glob("*.written"), *folder.glob("*.new")):
        note.unlink()


def _complete(found: bytes, header: bytes, noted: int, ends: Sequence[int]) -> int:
    """How many pieces of the file are there for sure."""
    return sum(end <= noted for end in ends) if found == header else 0


def _noted(path: Path) -> int:
    note = path.with_suffix(".written")
    try:
        return min(int(note.read_text()), path.stat().st_size)
    except (OSError, ValueError):
        return 0


def _note(path: Path, end: int) -> None:
    note = path.with_suffix(".written")
    new = note.with_suffix(".new")
    new.write_text(str(end))
    new.replace(note)


def _checked(piece: Piece, made: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    for name, stored in piece.stored.items():
        tensor = made[name]
        if (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) != (stored.dtype, stored.shape):
            raise CheckpointError(
                f"{name} became {tensor.dtype} {list(tensor.shape)}, not {stored.dtype} {list(stored.shape)}; this is "
                "a mistake of the package that quantized it"
            )
    return [made[name].contiguous().cpu() for name in piece.stored]
