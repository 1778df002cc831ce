"""SentencePiece's compiled rules that replace characters, as normalizers of a ``tokenizer.json``. Torch-free.

The rules are a double-array trie (Darts) of what is replaced, and the replacements, each ended by a zero byte, which
the leaves point at. ``tokenizers`` reads them, but for two things that are mended here: symbols that a user defined are
not replaced, and of the two characters of a line end each is. One is left: it looks up a character and the combining
marks behind it as one, SentencePiece each, so marks behind a character that is replaced are lost.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

#: A unit is a label in 8 bits, whether a leaf is behind it, and how far: or a leaf, and its value.
_LEAF, _HAS_LEAF = 1 << 31, 1 << 8


class CharacterRules:
    """Rules that can be looked up, and changed.

    Raises:
        ValueError: the bytes are no such rules.
    """

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<I", data)
        if size % 4 or not 0 < size <= len(data) - 4:
            raise ValueError("rules for characters of a wrong length")
        self._units = list(struct.unpack_from(f"<{size // 4}I", data, 4))
        self._texts = data[4 + size :]

    def replacement(self, text: str) -> str | None:
        """What stands in the place of ``text``; None: it stays."""
        found = self._find(text)
        if found is None:
            return None
        begin = self._units[found[1]] & ~_LEAF
        return self._texts[begin : self._texts.index(b"\0", begin)].decode("utf-8")

    def keep(self, text: str) -> None:
        """From now on ``text`` is not replaced, nor is more that begins with it."""
        found = self._find(text)
        if found is not None:
            # Texts with one replacement share a leaf, so this gets its own.
            last, _ = found
            offset = (last ^ len(self._units)) << 10
            self._units[last] = offset | _HAS_LEAF | self._units[last] & 255
            self._units.append(len(self._texts) | _LEAF)
            self._texts += text.encode("utf-8") + b"\0"

    def _find(self, text: str) -> tuple[int, int] | None:
        """The indices of the unit of the last byte, and of the leaf behind it."""
        at, last = _offset(self._units[0]), 0
        for byte in text.encode("utf-8"):
            last = at ^ byte
            if last >= len(self._units) or self._units[last] & (_LEAF | 255) != byte:
                return None
            at = last ^ _offset(self._units[last])
        return (last, at) if self._units[last] & _HAS_LEAF and at < len(self._units) else None

    def to_bytes(self) -> bytes:
        """The rules as they are now. A look-up goes on behind a leaf, and only then sees that nothing is there: so the
        last 256 units, of which it changes the number by a byte, are all there."""
        padded = self._units + [0] * (-len(self._units) % 256)
        units = struct.pack(f"<{len(padded)}I", *padded)
        return struct.pack("<I", len(units)) + units + self._texts


def character_normalizers(data: bytes, kept: Sequence[str]) -> list[dict[str, Any]]:
    """Normalizers for rules; ``kept``: symbols that are not replaced.

    Raises:
        ValueError: the bytes are no such rules.
    """
    rules = CharacterRules(data)
    found: list[dict[str, Any]] = []
    returned = rules.replacement("\r")
    if returned is not None and "\r" not in kept:
        # The library takes "\r\n" as one character and leaves out the second.
        found.append({"type": "Replace", "pattern": {"String": "\r"}, "content": returned})
    for text in kept:
        rules.keep(text)
    coded = base64.b64encode(rules.to_bytes()).decode("ascii")
    return [*found, {"type": "Precompiled", "precompiled_charsmap": coded}]


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 512) >> 6)
