"""Streaming detokenization: token ids to text, token by token.

Text that was returned never changes later. So only complete characters are returned: bytes of an incomplete character
wait for the next token. There are two ways, both with constant work per token:

- ``ByteDetokenizer`` for the decoders of nearly all checkpoints (byte-level BPE, and byte fallback with a marker for
  spaces): each token has fixed bytes, which go through an incremental UTF-8 decoder.
- ``WindowDetokenizer`` for every other decoder: it decodes a short window twice, with and without the new token.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable

_REPLACEMENT = "\ufffd"
#: A UTF-8 character has at most 4 bytes: no more tokens than this can complete one.
_MAX_HELD = 4


class Detokenizer(ABC):
    """The text of one sample. Not shared between samples."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that is complete after ``token_id``; often empty."""

    @abstractmethod
    def finish(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD. Do not call ``push`` afterwards."""


class ByteDetokenizer(Detokenizer):
    """For decoders in which every token has fixed bytes.

    Args:
        token_bytes: id to bytes; empty for a token without text.
        strip_first_space: remove one space at the beginning of the text.
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
    """For any decoder in which a token's text depends only on the few tokens before it.

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
        # Most decoders give U+FFFD for an incomplete character, some give nothing.
        if (not new or new.endswith(_REPLACEMENT)) and not final and len(self._held) < _MAX_HELD:
            return ""
        self._context, self._held = self._held, []
        self._context_text = self._decode(self._context)
        return new
