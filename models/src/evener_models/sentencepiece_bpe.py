"""SentencePiece's BPE as the parts of a ``tokenizer.json``, wherever its pieces come from. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evener_models.tokenizer_json import bpe

#: Types of pieces, as SentencePiece numbers them and GGUF after it.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
#: What stands for a space.
SPACE = "▁"


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: the text, score and type of each id.

    It says no merges. Two neighbours become one piece if what they spell is a piece, the best score first and the
    leftmost of equal ones: so every way to halve a piece is a merge of its score. Where two ways of halving one piece
    overlap in a text, SentencePiece takes the left one and ``tokenizers`` the one that is listed first; a vocabulary
    that was learned by merging does not come to that.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by text; of equal texts the first has the name."""
        found: dict[str, int] = {}
        for number, text in enumerate(self.texts):
            found.setdefault(text, number)
        return found

    def of_type(self, *types: int) -> list[int]:
        """The ids of these types."""
        return [number for number, kind in enumerate(self.types) if kind in types]

    def model(self, unknown: str | None, whole_words: bool = False) -> dict[str, Any]:
        """The model of a ``tokenizer.json``; ``whole_words``: a word that is a piece is not put together."""
        return bpe(
            self.ids, self._merges(), byte_fallback=BYTE in self.types, fuse_unk=True, unk_token=unknown,
            ignore_merges=whole_words,
        )  # fmt: skip

    def _merges(self) -> list[list[str]]:
        found = []
        for text, number in self.ids.items():
            if self.types[number] not in (CONTROL, UNKNOWN, BYTE):
                for at in range(1, len(text)):
                    left, right = self.ids.get(text[:at]), self.ids.get(text[at:])
                    if left is not None and right is not None:
                        found.append((-self.scores[number], left, right))
        found.sort()
        return [[self.texts[left], self.texts[right]] for _, left, right in found]


def spaces(prefix: bool) -> list[Mapping[str, Any]]:
    """The normalizers that mark spaces; ``prefix``: with one more before a text."""
    begin = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return [*begin, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def decoder(prefix: bool) -> dict[str, Any]:
    """Pieces to text: marks to spaces, byte pieces to characters, without the space that ``prefix`` put first."""
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}
