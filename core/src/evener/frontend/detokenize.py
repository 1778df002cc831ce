"""Ids to text as they come.

Text that was given out is never taken back. So a piece is given out once its characters are whole: bytes that may
still become a character wait for the next token. Two ways, both constant work a token:

- ``ByteDetokenizer`` for the decoders of nearly all checkpoints (byte-level BPE, and byte fallback with a marker for
  spaces): each token has fixed bytes, which go through an incremental UTF-8 decoder.
- ``WindowDetokenizer`` for every other decoder: decodes a short window twice, with and without the new token.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable

_REPLACEMENT = "\ufffd"
#: A UTF-8 character has at most 4 bytes: a window that waits for more tokens than this waits for nothing.
_MAX_HELD = 4


class Detokenizer(ABC):
    """The text of one sample. Not shared between samples."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; often empty."""

    @abstractmethod
    def finish(self) -> str:
        """What was still held back; an incomplete character becomes U+FFFD. Nothing may be pushed afterwards."""


class ByteDetokenizer(Detokenizer):
    """For decoders under which every token has bytes of its own.

    Args:
        token_bytes: id to bytes; empty for a token without text.
        strip_first_space: leave out one space at the very beginning.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = strip_first_space

    def push(self, token_id: int) -> str:
        return self._stripped(self._decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        return self._stripped(self._decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text


class WindowDetokenizer(Detokenizer):
    """For any decoder whose text of a token depends on at most the few tokens before it.

    Args:
        decode: ids to text.
        keep: False for ids that have no text (special tokens that are skipped).
    """

    def __init__(self, decode: Callable[[list[int]], str], keep: Callable[[int], bool]) -> None:
        self._decode, self._keep = decode, keep
        self._context: list[int] = []
        self._held: list[int] = []
        self._context_text = ""

    def push(self, token_id: int) -> str:
        if not self._keep(token_id):
            return ""
        self._held.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True) if self._held else ""

    def _take(self, final: bool) -> str:
        text = self._decode(self._context + self._held)
        new = text[len(self._context_text) :]
        # An incomplete character is U+FFFD to most decoders, and nothing at all to some.
        if (not new or new.endswith(_REPLACEMENT)) and not final and len(self._held) < _MAX_HELD:
            return ""
        self._context, self._held = self._held, []
        self._context_text = self._decode(self._context)
        return new
