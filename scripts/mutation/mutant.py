"""One change of one place in a source file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A file with the characters ``start`` to ``end`` replaced by ``after``.

    Attributes:
        file: path of the file from the root of the repository.
        operator: the kind of change, such as "off by one".
        line: number of the line of ``start``, from 1.
        was, now: that line without indentation, before and after the change.
        nth: how many earlier lines of the file equal ``was``; with it a review finds the mutant again after other lines
            have moved.
    """

    file: str
    start: int
    end: int
    after: str
    operator: str
    line: int
    was: str
    now: str
    nth: int

    @staticmethod
    def at(file: str, source: str, start: int, end: int, after: str, operator: str) -> Mutant:
        """The mutant of ``source`` that replaces these characters. A change within one line."""
        first = source.rfind("\n", 0, start) + 1
        last = source.find("\n", end)
        last = len(source) if last < 0 else last
        was = source[first:last]
        now = source[first:start] + after + source[end:last]
        earlier = source[:first].splitlines()
        nth = sum(line.strip() == was.strip() for line in earlier)
        return Mutant(file, start, end, after, operator, len(earlier) + 1, was.strip(), now.strip(), nth)

    def apply(self, source: str) -> str:
        """The mutated source."""
        return source[: self.start] + self.after + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.operator}: {self.was} -> {self.now}"
