"""One cache file: tensors, and the fingerprint of what they were made from. It is a safetensors file, so that tools can
read it; each tensor is bytes, and begins at a multiple of 64 bytes.

A file appears whole or not at all: it is written under another name, made durable, and renamed. Who writes holds a
lock, so what a killed process leaves is overwritten by the next one that writes, and two that write at once do not
disturb each other. Only files of this user are read, in a folder of this user.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from evener.contracts.checkpoint import Extent
from evener.errors import CheckpointError, ConfigError
from evener_formats.safetensors_files import SafetensorsFile

#: Where each tensor begins: at a multiple of a cache line, which is also the widest register.
ALIGNMENT = 64
#: The longest header that is read.
MAX_HEADER = 64 << 20
#: Bytes that stay free on the disk.
_SPARE = 256 << 20
_KEY = "evener_model_cache"


class Unusable(Exception):
    """Why a cache file is not read, or not written: a phrase for a message."""


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the bytes of a stored tensor are: torch's name of the dtype, and the shape."""

    dtype: str
    shape: tuple[int, ...]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds beside numbers.

    Attributes:
        fingerprint: see ``fingerprint``.
        tensors: of each stored tensor, in order.
        weights: the tensors of each weight: its name, and their numbers.
    """

    fingerprint: dict[str, str]
    tensors: list[StoredTensor]
    weights: dict[str, list[int]]


def prepare_folder(folder: Path) -> None:
    """Create the folder, for this user alone, if it is not there.

    Raises:
        ConfigError: it cannot be created, is a link or no folder, belongs to another user, or others may write in it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"model_cache={folder} cannot be used: {error}; give another folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"model_cache={folder} is a link or no folder; give the folder itself")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"model_cache={folder} belongs to another user, who could replace weights; give a folder of "
                          "the user that runs evener")  # fmt: skip
    if found.st_mode & 0o022:
        raise ConfigError(f"others may write in model_cache={folder} and replace weights; type: chmod go-w {folder}")


class CacheFile:
    """An open cache file.

    Args:
        limit: the most bytes that it may have.

    Raises:
        Unusable: there is none, or it is not a whole one of this user.
    """

    def __init__(self, path: Path, limit: int) -> None:
        _check_owner(path, limit)
        try:
            self._file = SafetensorsFile(path)
            self.index = msgspec.json.decode(_index_text(path), type=Index)
        except (CheckpointError, msgspec.DecodeError, OSError) as error:
            raise Unusable(f"it is damaged ({str(error)[:200]})") from error
        wanted = [(str(n), ("uint8", (_stored_bytes(t),))) for n, t in enumerate(self.index.tensors)]
        if dict(wanted) != dict(self._file.headers):
            raise Unusable("it is damaged (its index is of other tensors)")

    def tensor(self, number: int) -> torch.Tensor:
        """A stored tensor, mapped. It stays valid when the file is closed or replaced."""
        stored = self.index.tensors[number]
        whole, dtype = self._file.tensor(str(number)), _dtype(stored.dtype)
        return whole[: _nbytes(stored)].view(dtype).view(stored.shape)

    def extent(self, number: int) -> Extent:
        """Where the file holds it."""
        return self._file.extent(str(number))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_cache(
    path: Path, fingerprint: Mapping[str, str], tensors: Sequence[torch.Tensor], weights: Mapping[str, Sequence[int]]
) -> int:
    """Write a cache file, in place of an earlier one; returns its bytes.

    Args:
        tensors: on any device.

    Raises:
        Unusable: another process is writing it, or the disk has no room.
        OSError: the disk is full, or broken.
    """
    stored = [StoredTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors]
    header = _header(Index(dict(fingerprint), stored, {name: list(each) for name, each in weights.items()}))
    size = len(header) + sum(map(_stored_bytes, stored))
    partial = path.with_name(f"{path.name}.partial")
    descriptor = _locked(partial)
    try:
        free = shutil.disk_usage(path.parent).free
        if len(header) > MAX_HEADER or size + _SPARE > free + os.fstat(descriptor).st_size:
            raise Unusable(f"it would take {size:,} bytes, and {free:,} are free in {path.parent}")
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.truncate(0)
            file.write(header)
            for tensor, each in zip(tensors, stored, strict=True):
                if tensor.numel():
                    file.write(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
                file.write(bytes(_stored_bytes(each) - _nbytes(each)))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size


def _locked(partial: Path) -> int:
    """The file that is written, created if it is not there, with its lock.

    Raises:
        Unusable: another process has the lock, or just renamed the file.
    """
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had the lock may have renamed the file since it was opened here: then it is the cache, and in use.
        if not os.path.samestat(os.fstat(descriptor), partial.stat(follow_symlinks=False)):
            raise FileNotFoundError(partial)
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(descriptor)
        raise Unusable("another process is writing it") from error
    return descriptor


def _check_owner(path: Path, limit: int) -> None:
    """Before anything is read: a regular file of this user, of a size that the weights can have."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise Unusable("there is none yet") from None
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISREG(found.st_mode):
        raise Unusable("it is a link or no file")
    if found.st_uid != os.geteuid():
        raise Unusable("it belongs to another user")
    if found.st_mode & 0o022:
        raise Unusable("others may write it")
    if found.st_size > limit:
        raise Unusable(f"it has {found.st_size:,} bytes, more than these weights")


def _index_text(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER:
        raise CheckpointError("its header is too long")
    try:
        with safe_open(path, framework="numpy") as opened:
            return str((opened.metadata() or {}).get(_KEY, ""))
    except SafetensorError as error:
        raise CheckpointError(str(error)) from error


def _header(index: Index) -> bytes:
    entries, at = {}, 0
    for number, stored in enumerate(index.tensors):
        size = _stored_bytes(stored)
        entries[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {_KEY: msgspec.json.encode(index).decode()}, **entries}).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unusable(f"it is damaged ({name[:40]!r} is no dtype)")
    return found


def _nbytes(stored: StoredTensor) -> int:
    """Bytes of the numbers."""
    count = _dtype(stored.dtype).itemsize
    for size in stored.shape:
        if size < 0:
            raise Unusable("it is damaged (a size is negative)")
        count *= size
    return count


def _stored_bytes(stored: StoredTensor) -> int:
    """Bytes in the file: a whole number of lines, and at least one."""
    return max(1, -(-_nbytes(stored) // ALIGNMENT)) * ALIGNMENT
