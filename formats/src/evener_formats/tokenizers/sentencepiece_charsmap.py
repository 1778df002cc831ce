"""SentencePiece's compiled rules that replace characters, as normalizers of a ``tokenizer.json``. Torch-free.

The rules are a double-array trie (Darts) of the texts to replace, followed by the replacements, each ended by a zero
byte; the leaves are offsets of replacements. ``tokenizers`` reads such rules, with three differences from
SentencePiece. Two are corrected here: user-defined symbols must not be replaced, and in "\\r\\n" each character must be
replaced by itself. One is
left: ``tokenizers`` looks up a character together with its combining marks, SentencePiece each alone, so marks after a
replaced character are lost.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

#: A unit of the trie: a label in 8 bits, a flag "has a leaf", and an offset; or the leaf flag and the leaf's value.
_LEAF, _HAS_LEAF = 1 << 31, 1 << 8


class PrecompiledCharsmap:
    """Rules that can be looked up and changed.

    Raises:
        ValueError: the bytes are not such rules.
    """

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<I", data)
        if size % 4 or not 0 < size <= len(data) - 4:
            raise ValueError("rules for characters of a wrong length")
        self._units = list(struct.unpack_from(f"<{size // 4}I", data, 4))
        self._texts = data[4 + size :]

    def replacement(self, text: str) -> str | None:
        """The replacement of ``text``; None if it is not replaced."""
        found = self._find(text)
        if found is None:
            return None
        begin = self._units[found[1]] & ~_LEAF
        return self._texts[begin : self._texts.index(b"\0", begin)].decode("utf-8")

    def keep(self, text: str) -> None:
        """Change the rules so that ``text``, and longer texts that begin with it, are not replaced."""
        found = self._find(text)
        if found is not None:
            # Texts with equal replacements share a leaf, so this one gets a leaf of its own.
            last, _ = found
            offset = (last ^ len(self._units)) << 10
            self._units[last] = offset | _HAS_LEAF | self._units[last] & 255
            self._units.append(len(self._texts) | _LEAF)
            self._texts += text.encode("utf-8") + b"\0"

    def _find(self, text: str) -> tuple[int, int] | None:
        """The indices of the last byte's unit and of its leaf; None if there is no rule for ``text``."""
        at, last = _offset(self._units[0]), 0
        for byte in text.encode("utf-8"):
            last = at ^ byte
            if last >= len(self._units) or self._units[last] & (_LEAF | 255) != byte:
                return None
            at = last ^ _offset(self._units[last])
        return (last, at) if self._units[last] & _HAS_LEAF and at < len(self._units) else None

    def to_bytes(self) -> bytes:
        """The rules, in the file's format. A look-up XORs an index with a byte before it checks the result, so the
        number of units is padded to a multiple of 256."""
        padded = self._units + [0] * (-len(self._units) % 256)
        units = struct.pack(f"<{len(padded)}I", *padded)
        return struct.pack("<I", len(units)) + units + self._texts


def charsmap_normalizers(data: bytes, kept: Sequence[str]) -> list[dict[str, Any]]:
    """The normalizers for the rules in ``data``; ``kept``: symbols that must not be replaced.

    Raises:
        ValueError: the bytes are not such rules.
    """
    rules = PrecompiledCharsmap(data)
    found: list[dict[str, Any]] = []
    returned = rules.replacement("\r")
    if returned is not None and "\r" not in kept:
        # tokenizers takes "\r\n" as one character and would lose the second.
        found.append({"type": "Replace", "pattern": {"String": "\r"}, "content": returned})
    for text in kept:
        rules.keep(text)
    coded = base64.b64encode(rules.to_bytes()).decode("ascii")
    return [*found, {"type": "Precompiled", "precompiled_charsmap": coded}]


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 512) >> 6)
