"""How many bytes of text one token may stand for, so that a text can be refused by its length before it is encoded."""

from __future__ import annotations

import json
import math
from typing import Any, Protocol

from evener_formats.tokenizers.token_bytes import byte_level_table

#: Normalizers, and the most bytes of text for one byte of what they make of it. Unicode's composition makes a third of
#: some sequences, its compatible forms a quarter of some characters (U+1D400 becomes A), lower case a third (U+212A).
#: Those that are not here may leave out any amount of text, as one that makes one space of many does.
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 16, "NFKD": 16, "Lowercase": 4, "ByteLevel": 1, "Prepend": 1}
#: Pre-tokenizers that keep all text.
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}


class Library(Protocol):
    """What is asked of a ``tokenizers.Tokenizer``."""

    model: Any
    normalizer: Any
    pre_tokenizer: Any

    def token_to_id(self, token: str) -> int | None: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...


def most_bytes(library: Library, longest: int) -> float:
    """The most bytes of text that one token stands for; infinite if there is no limit.

    Args:
        longest: bytes of the longest entry of the vocabulary.
    """
    spaces = any(token.lstrip or token.rstrip for token in library.get_added_tokens_decoder().values())
    pre = _spec(library.pre_tokenizer)
    if spaces or not _keeps(pre) or not _knows_all(library, pre):
        return math.inf
    return max(longest, 4) * _shrinks(_spec(library.normalizer))  # an unknown character is one token


def _spec(part: Any) -> dict[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _shrinks(normalizer: dict[str, Any]) -> float:
    kind = normalizer.get("type")
    if kind == "Sequence":
        return math.prod(map(_shrinks, normalizer["normalizers"]))
    if kind == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return max(1.0, len(old.encode()) / len(new.encode())) if old and new else math.inf
    return _SHRINKING.get(kind, math.inf) if kind else 1


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    return not kind or kind in _KEEPING or (kind in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed")


def _knows_all(library: Library, pre_tokenizer: dict[str, Any]) -> bool:
    """Whether no run of unknown text becomes one token, or none."""
    model = library.model
    if type(model).__name__ not in ("BPE", "Unigram"):
        return False  # a long word that is not known is one token
    if "ByteLevel" in json.dumps([pre_tokenizer, _spec(library.normalizer)]):
        every = list(byte_level_table())
    else:
        every = [f"<0x{byte:02X}>" for byte in range(256)] if getattr(model, "byte_fallback", False) else []
    whole = bool(every) and all(library.token_to_id(each) is not None for each in every)
    return whole or (type(model).__name__ == "BPE" and model.unk_token is not None and not model.fuse_unk)
