"""One rank's files: one for each block, named by its group and key. Torch-free.

A file is a header, the block's bytes as they are in memory, and a checksum of both. It is written under another name
and renamed, so a file with a block's name is whole, unless the machine has lost power: then the checksum says so. What
is read is used only if the header names the same format, group and key, and the checksum is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from evener_kv.files.private_folder import lock_within, open_inside, open_private

#: A block's key: its group, and the digest of all tokens up to its end.
Key = tuple[int, bytes]
_MAGIC = b"evener kv block 1\n"
_DIGEST = 32
_NAME = re.compile(r"(\d{1,3})-([0-9a-f]{64})")
_HALF = ".new"


class InUse(Exception):
    """Another engine has the folder."""


class BlockFiles:
    """The files of a rank whose blocks have the format ``form``, in a folder named after it.

    Args:
        form: 32 bytes, equal for runs that may read each other's blocks.
        sizes: bytes of one block of each group; 0: this rank has no such blocks.

    Raises:
        InUse: another engine of the same format uses it.
        OSError: a folder cannot be made or opened, or others may use it.
    """

    def __init__(self, folder: Path, form: bytes, sizes: Sequence[int]) -> None:
        self._form, self._sizes, self._parts = form, sizes, dict[str, int]()
        self._open = list[int]()
        try:
            self._open.append(open_private(folder))
            self._open.append(open_inside(self._open[0], form.hex()[:32]))
            if (lock := lock_within(self._open[1], "lock")) is None:
                raise InUse
            self._open.append(lock)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the folders. Calling it again does nothing."""
        for opened in [*self._parts.values(), *reversed(self._open)]:
            os.close(opened)
        self._parts, self._open = {}, []

    def file_bytes(self, group: int) -> int:
        """Bytes of a file with a block of this group; 0: there is none."""
        size = self._sizes[group]
        return size and len(_MAGIC) + len(self._form) + 4 + _DIGEST + size + _DIGEST

    def keys(self) -> list[Key]:
        """The blocks that have a file of the right size, those that were written first at the beginning. Removes other
        files of ours that nobody will read."""
        found: list[tuple[float, Key]] = []
        for first in range(256):
            part = self._part(f"{first:02x}")
            with os.scandir(part) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    match = _NAME.fullmatch(entry.name)
                    key = (int(match[1]), bytes.fromhex(match[2])) if match else (len(self._sizes), b"")
                    size = self.file_bytes(key[0]) if key[0] < len(self._sizes) else 0
                    regular = stat.S_ISREG(status.st_mode)
                    if regular and size and status.st_size == size and entry.name == self._name(key):
                        found.append((status.st_mtime, key))
                    elif regular and (match or entry.name.endswith(_HALF)):
                        os.unlink(entry.name, dir_fd=part)
        return [key for _, key in sorted(found)]

    def write(self, key: Key, block: memoryview) -> None:
        """Write a block; one that has a file keeps it.

        Raises:
            OSError: the disk is full or broken.
        """
        part, name = self._part(f"{key[1][0]:02x}"), self._name(key)
        header = self._header(key)
        check = hashlib.blake2b(header, digest_size=_DIGEST)
        check.update(block)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(name + _HALF, flags, 0o600, dir_fd=part)
        try:
            for piece in (memoryview(header), block, memoryview(check.digest())):
                while piece:
                    piece = piece[os.write(opened, piece) :]
            os.rename(name + _HALF, name, src_dir_fd=part, dst_dir_fd=part)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name + _HALF, dir_fd=part)
            raise
        finally:
            os.close(opened)

    def read(self, key: Key, block: memoryview) -> bool:
        """Read a block. Returns False if there is no such file, or what it has is not that block: then ``block`` may
        hold anything, and the file is removed.

        Raises:
            OSError: the disk is broken.
        """
        part, name = self._part(f"{key[1][0]:02x}"), self._name(key)
        try:
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=part)
        except FileNotFoundError:
            return False
        try:
            status, header = os.fstat(opened), bytearray(len(self._header(key)))
            whole = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
            whole = whole and status.st_size == self.file_bytes(key[0])
            check, found = hashlib.blake2b(digest_size=_DIGEST), bytearray(_DIGEST)
            for piece in (memoryview(header), block, memoryview(found)):
                whole = whole and _fill(opened, piece)
            if whole:
                check.update(header)
                check.update(block)
            whole = whole and bytes(header) == self._header(key) and bytes(found) == check.digest()
        finally:
            os.close(opened)
        if not whole:
            self.remove(key)
        return whole

    def remove(self, key: Key) -> None:
        """Remove a block's file, if there is one.

        Raises:
            OSError: the disk is broken.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name(key), dir_fd=self._part(f"{key[1][0]:02x}"))

    def _header(self, key: Key) -> bytes:
        return _MAGIC + self._form + key[0].to_bytes(4, "big") + key[1]

    @staticmethod
    def _name(key: Key) -> str:
        return f"{key[0]}-{key[1].hex()}"

    def _part(self, name: str) -> int:
        if name not in self._parts:
            self._parts[name] = open_inside(self._open[1], name)
        return self._parts[name]


def _fill(opened: int, piece: memoryview) -> bool:
    """Fill ``piece`` from a file; False: the file is shorter."""
    while piece:
        count = os.readv(opened, [piece])
        if not count:
            return False
        piece = piece[count:]
    return True
