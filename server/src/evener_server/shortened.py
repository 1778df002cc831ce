"""Texts of which fewer tokens are left."""

from __future__ import annotations

from collections.abc import Sequence

from evener.frontend.tokenizer import Tokenizer


class ShortenedText:
    """A text without the tokens at one of its ends.

    Args:
        ids: the text's tokens.
        most: tokens that are left at most; None: all.
        keeps_end: its beginning is cut, not its end.

    Attributes:
        left: number of tokens that are left.
    """

    def __init__(self, text: str, ids: Sequence[int], most: int | None, keeps_end: bool = False) -> None:
        self._text, self._ids, self._keeps_end = text, ids, keeps_end
        self.left = len(ids) if most is None else min(most, len(ids))

    def text(self, tokenizer: Tokenizer) -> str:
        """What is left."""
        if self.left == len(self._ids):
            return self._text
        kept = self._ids[len(self._ids) - self.left :] if self._keeps_end else self._ids[: self.left]
        return tokenizer.decode(kept, skip_special_tokens=False)


def shorten(first: ShortenedText, second: ShortenedText, count: int) -> bool:
    """Take ``count`` tokens from two texts, from the longer one while they differ, as tokenizers shorten a pair. False:
    nothing is left of either."""
    if not first.left and not second.left:
        return False
    longer, shorter = (first, second) if first.left > second.left else (second, first)
    taken = min(count, longer.left - shorter.left)
    longer.left -= taken
    rest = count - taken
    longer.left = max(longer.left - (rest + 1) // 2, 0)
    shorter.left = max(shorter.left - rest // 2, 0)
    return True
