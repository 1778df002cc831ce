"""Text that comes in pieces, in which marks such as ``<tool_call>`` may be cut at any character."""

from __future__ import annotations

from collections.abc import Sequence


class TextStream:
    """Text that was fed and not yet taken.

    Attributes:
        text: what is left.
        ended: no more text comes.
    """

    def __init__(self) -> None:
        self.text, self.ended = "", False

    def take(self, count: int) -> str:
        """The next ``count`` characters, which are then gone."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def starts_with(self, mark: str) -> bool | None:
        """Whether the text begins with ``mark``; None if that is not yet certain."""
        if self.text.startswith(mark):
            return True
        return None if not self.ended and mark.startswith(self.text) else False

    def until(self, marks: Sequence[str]) -> tuple[str, str]:
        """Take what certainly comes before the first of ``marks``, and that mark if it is there.

        Returns:
            The text before, and the mark; "" if no mark was found so far.
        """
        found = min(((at, -len(mark), mark) for mark in marks if (at := self.text.find(mark)) >= 0), default=None)
        if found is None:
            return self.take(len(self.text) - (0 if self.ended else self._started(marks))), ""
        before = self.take(found[0])
        return before, self.take(len(found[2]))

    def _started(self, marks: Sequence[str]) -> int:
        """Length of the longest end of the text with which one of ``marks`` begins."""
        longest = min(len(self.text), max(map(len, marks)) - 1)
        for size in range(longest, 0, -1):
            if any(mark.startswith(self.text[-size:]) for mark in marks):
                return size
        return 0
