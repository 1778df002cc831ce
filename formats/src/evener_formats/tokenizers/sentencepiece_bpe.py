"""SentencePiece's BPE as parts of a ``tokenizer.json``, for pieces from any file. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from evener.errors import CheckpointError
from evener_formats.tokenizers.merge_cache import MergeCache
from evener_formats.tokenizers.tokenizer_json import bpe

#: SentencePiece's types of pieces, which GGUF uses too.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
#: The mark that stands for a space.
SPACE = "▁"
#: Of a piece, in characters. Finding its merges takes time and memory with the square of it; real ones have at most
#: some hundred.
MOST_CHARACTERS = 1024
#: Of a longer piece it is not asked which of its merges can happen.
_MANY = 64


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: the text, score and type of each id.

    It has no list of merges. SentencePiece joins two neighbours if their joined text is a piece, the best score first,
    and the leftmost of equal scores. So every way to divide a piece into two pieces is a merge, with the piece's score.
    If two such divisions of one piece overlap in a text, SentencePiece takes the left one and ``tokenizers`` the one
    listed first; in a vocabulary that was learned by merging this does not happen.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by text; of equal texts, the first one's."""
        found = dict(zip(self.texts, range(len(self.texts)), strict=True))
        if len(found) == len(self.texts):
            return found
        found = {}
        for number, text in enumerate(self.texts):
            found.setdefault(text, number)
        return found

    def of_type(self, *types: int) -> list[int]:
        """The ids of pieces of these types."""
        # Without numpy, whose search would wait here while torch's libraries are loaded.
        return [number for number, each in enumerate(self.types) if each in types]

    def model(self, unknown: str | None, whole_words: bool = False) -> dict[str, Any]:
        """The model of a ``tokenizer.json``; ``whole_words``: a word that is a piece is not merged from letters."""
        return bpe(
            self.ids, self._merges(), byte_fallback=BYTE in self.types, fuse_unk=True, unk_token=unknown,
            ignore_merges=whole_words,
        )  # fmt: skip

    def _merges(self) -> list[tuple[str, str]]:
        """The merges, in order of priority. Those of a large vocabulary take a second and are kept."""
        cache = MergeCache.of(self.texts, self.scores, self.types)
        pairs = None if cache is None else cache.read()
        if pairs is None:
            pairs = self._pairs()
            if cache is not None:
                pairs = self._used(pairs)
                cache.write(pairs)
        texts = np.array(self.texts, dtype=object)
        return list(zip(texts[pairs[:, 0]].tolist(), texts[pairs[:, 1]].tolist(), strict=True))

    def _pairs(self) -> np.ndarray:
        """The merges as ids, int32 [merges, 2].

        Raises:
            CheckpointError: a piece is longer than ``MOST_CHARACTERS``.
        """
        joined = {text: id for text, id in self.ids.items() if self.types[id] not in (CONTROL, UNKNOWN, BYTE)}
        if (longest := max(map(len, joined), default=0)) > MOST_CHARACTERS:
            raise CheckpointError(
                f"a token of the vocabulary has {longest:,} characters, and at most {MOST_CHARACTERS:,} are allowed; "
                "fetch the model again, or give another folder with a tokenizer: tokenizer=FOLDER"
            )
        found, lefts, rights, find = [], [], [], self.ids.get
        for text, number in joined.items():
            for at in range(1, len(text)):
                left = find(text[:at])
                if left is not None and (right := find(text[at:])) is not None:
                    found.append(number)
                    lefts.append(left)
                    rights.append(right)
        scores = np.asarray(self.scores, dtype=np.float64)[np.asarray(found, dtype=np.int64)]
        order = np.lexsort((rights, lefts, -scores))
        return np.stack((np.asarray(lefts, dtype=np.int32), np.asarray(rights, dtype=np.int32)), axis=1)[order]

    def _used(self, pairs: np.ndarray) -> np.ndarray:
        """Those of ``pairs``, all merges, that can happen in a text.

        The merges inside a piece are the same in every text, so it is enough to tokenize the piece alone. Its last
        merge is used; the other ways to divide it never happen: half of Gemma's merges. Where that is not known, all
        merges are kept: beside pieces that are not made of characters, and of pieces with invalid characters, or with
        more than ``_MANY`` characters, as the time grows with the square of their number.
        """
        texts, find, size, never = self.texts, self.ids.get, len(self.texts), len(pairs)
        results = [self.ids[texts[a] + texts[b]] for a, b in pairs.tolist()]
        made, keys = np.asarray(results), pairs[:, 0].astype(np.int64) * size + pairs[:, 1]
        rank = dict(zip(keys.tolist(), range(never), strict=True)).get
        long = np.fromiter(map(len, texts), dtype=np.int64, count=size) > _MANY
        odd = np.isin(np.asarray(self.types), (CONTROL, UNKNOWN, BYTE))
        used = (np.bincount(made, minlength=size)[made] == 1) | odd[pairs].any(axis=1) | long[made]
        unknown = []
        for number in np.unique(made[~used]).tolist():
            symbols = [find(character, -1) for character in texts[number]]
            if -1 in symbols:
                unknown.append(number)
                continue
            asked = [rank(a * size + b, never) for a, b in itertools.pairwise(symbols)]
            while (best := min(asked)) != never:
                if len(asked) == 1:
                    used[best] = True
                    break
                at = asked.index(best)
                symbols[at : at + 2] = [results[best]]
                begin = max(at - 1, 0)
                near = itertools.pairwise(symbols[begin : at + 2])
                asked[begin : at + 2] = [rank(a * size + b, never) for a, b in near]
        found: np.ndarray = pairs[used | np.isin(made, unknown)]
        return found


def spaces(prefix: bool) -> list[Mapping[str, Any]]:
    """The normalizers that replace spaces by marks; ``prefix``: with one more space before a text."""
    begin = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return [*begin, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def decoder(prefix: bool) -> dict[str, Any]:
    """The decoder from pieces to text: marks become spaces, byte pieces characters; the space of ``prefix`` is
    removed."""
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}
