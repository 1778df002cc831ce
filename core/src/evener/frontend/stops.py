"""Finds stop strings, also those that span several tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The text that may be shown, and the stop string if one was found."""

    text: str
    stop: str | None = None


class StopStrings:
    """Searches one sample's text for stop strings.

    Text that may be the beginning of a stop string is held back until that is decided, so returned text never changes.
    The match that ends first wins; of two that end at the same character, the one that begins earlier.

    Args:
        stops: strings, none empty.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops, self._include = stops, include
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Add the next piece of text. Do not call it again after a match."""
        buffer = self._held + text
        found = self._find(buffer)
        if found is not None:
            begin, stop = found
            self._held = ""
            return StopMatch(buffer[: begin + len(stop)] if self._include else buffer[:begin], stop)
        keep = self._partial_match_len(buffer)
        self._held = buffer[len(buffer) - keep :]
        return StopMatch(buffer[: len(buffer) - keep])

    def finish(self) -> str:
        """The text that was still held back; it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = buffer.find(stop)
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        return None if best is None else (best[1], best[2])

    def _partial_match_len(self, buffer: str) -> int:
        """Length of the longest suffix of ``buffer`` that is a prefix of a stop string."""
        sizes = ((stop, size) for stop in self._stops for size in range(1, min(len(stop) - 1, len(buffer)) + 1))
        return max((size for stop, size in sizes if buffer.endswith(stop[:size])), default=0)
