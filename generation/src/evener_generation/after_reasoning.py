"""A matcher for answers with reasoning before them: while the model reasons, any token may come.

Where reasoning is a message among others, as in harmony, its end is more than one mark: that of the message, and the
begin of the next. Then it has no other marks, and once the first mark of its end has come, the rest must: otherwise a
model could begin a message that its grammar does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from evener.contracts.grammar.library import Matcher
from evener_generation.forced_tokens import forced_by
from evener_generation.proposed_tokens import masks_behind


@dataclass(frozen=True)
class Reasoning:
    """What stands before the answer.

    Attributes:
        begin: ids of the tokens with which reasoning begins; empty: it has begun already.
        end: its last text; end_ids: the same as tokens.
        budget: tokens that it may have, those of ``end`` left out; None: any number.
        forced: without the first token of ``begin`` there is no reasoning, and the text is the answer.
        mask_bytes: of a mask.
        ends: ids that end a text, which reasoning does not.
        read: the bytes of a token.
        write: ids of a text that follows.
        marks: the marks of a format whose end is more than one mark; None: reasoning may have any.
    """

    begin: tuple[int, ...]
    end: bytes
    end_ids: tuple[int, ...]
    budget: int | None
    mask_bytes: int
    vocab_size: int
    ends: tuple[int, ...]
    read: Callable[[int], bytes]
    write: Callable[[bytes], list[int]]
    marks: Marks | None = None

    @cached_property
    def free(self) -> bytes:
        """The mask of reasoning, wherever it stands."""
        own = () if self.marks is None else (each for each in self.marks.ids if each != self.end_ids[0])
        return self.any(but=(*self.ends, *own))

    def any(self, but: Iterable[int]) -> bytes:
        """A mask of all tokens but some."""
        bits = bytearray(((1 << self.vocab_size) - 1).to_bytes(self.mask_bytes, "little"))
        return without(bits, but)


class Marks(Protocol):
    """The marks of a format, which are tokens of their own."""

    @property
    def ids(self) -> Collection[int]:
        """Of these tokens."""

    @property
    def longest(self) -> int:
        """Bytes of the longest mark."""

    def completing(self, tail: bytes) -> Iterable[int]:
        """Other tokens that make the text of a mark behind a text which ends with ``tail``: parsers read texts."""


@dataclass
class _State:
    """How far the text is.

    Attributes:
        where: "start", "begin" (its mark is being written), "reasoning", "end" (its mark is), or "answer".
        place: tokens of the mark that were written.
        count: tokens of reasoning.
        tail: the last bytes of it.
        end: ids that still end it, once it must end.
    """

    where: str
    place: int = 0
    count: int = 0
    tail: bytes = b""
    end: tuple[int, ...] = ()


class AfterReasoning(Matcher):
    """Reasoning, and then what another matcher allows.

    Args:
        reasoning: what stands before the answer.
        answer: the matcher of the answer; None: any answer.
    """

    def __init__(self, reasoning: Reasoning, answer: Matcher | None, state: _State | None = None) -> None:
        self._reasoning, self._answer = reasoning, answer
        self._state = state or _State("start" if reasoning.begin else "reasoning")

    def copy(self) -> Matcher:
        answer = None if self._answer is None else self._answer.copy()
        return AfterReasoning(self._reasoning, answer, replace(self._state))

    def mask(self) -> bytes:
        reasoning, state = self._reasoning, self._state
        self._keep_budget()
        if state.where == "begin":
            return self._only(reasoning.begin[state.place])
        if state.where == "end":
            return self._only(state.end[state.place])
        if state.where == "reasoning":
            bad = () if reasoning.marks is None else reasoning.marks.completing(state.tail)
            return without(bytearray(reasoning.free), bad) if bad else reasoning.free
        if self._answer is None:
            return reasoning.any(but=())
        mask = self._answer.mask()
        if state.where == "start":
            begins = bytearray(mask)
            _set(begins, reasoning.begin[0])
            return bytes(begins)
        return mask

    def fitting(self, tokens: list[int]) -> int:
        if self._state.where == "answer" and self._answer is not None:
            return self._answer.fitting(tokens)
        return len(tokens)

    def forced(self) -> list[int]:
        self._keep_budget()
        state, answer = self._state, self._answer
        if state.where in ("begin", "end"):
            return list((self._reasoning.begin if state.where == "begin" else state.end)[state.place :])
        return forced_by(answer) if state.where == "answer" else []

    def masks(self, tokens: list[int]) -> list[bytes] | list[memoryview]:
        if self._state.where == "answer" and self._answer is not None:
            return self._answer.masks(tokens)
        return masks_behind(self.copy(), tokens)  # the answer has not begun, so a copy is small

    def _keep_budget(self) -> None:
        """Reasoning that has no token left must end."""
        if self._state.where == "reasoning" and self._state.count == self._reasoning.budget:
            self._state.where, self._state.end = "end", self._left_of_end()

    def accept(self, token: int) -> None:
        self._keep_budget()
        reasoning, state = self._reasoning, self._state
        if state.where == "start":
            state.where = "begin" if token == reasoning.begin[0] else "answer"
        if state.where == "begin":
            state.place += 1
            if state.place == len(reasoning.begin):
                state.where, state.place = "reasoning", 0
        elif state.where == "end":
            state.place += 1
            if state.place == len(state.end):
                state.where = "answer"
        elif state.where == "reasoning":
            self._reason(token)
        elif self._answer is not None:
            self._answer.accept(token)

    def _reason(self, token: int) -> None:
        reasoning, state = self._reasoning, self._state
        if reasoning.marks is not None and token == reasoning.end_ids[0]:
            state.where, state.place, state.end = "end", 1, reasoning.end_ids
            return
        text = state.tail + reasoning.read(token)
        at = text.find(reasoning.end)
        if at < 0:
            kept = max(len(reasoning.end), 0 if reasoning.marks is None else reasoning.marks.longest)
            state.tail, state.count = text[-kept:], state.count + 1
            return
        state.where = "answer"
        # Blank characters behind the mark belong to neither part.
        rest = text[at + len(reasoning.end) :].lstrip()
        if rest and self._answer is not None:
            for each in reasoning.write(rest):
                self._answer.accept(each)

    def _left_of_end(self) -> tuple[int, ...]:
        """The rest of the end, of which some may be written already."""
        if self._reasoning.marks is not None:
            return self._reasoning.end_ids  # text is no mark
        end, tail = self._reasoning.end, self._state.tail
        done = next((size for size in range(len(end) - 1, 0, -1) if tail.endswith(end[:size])), 0)
        return tuple(self._reasoning.write(end[done:])) if done else self._reasoning.end_ids

    def _only(self, token: int) -> bytes:
        bits = bytearray(self._reasoning.mask_bytes)
        _set(bits, token)
        return bytes(bits)


def without(bits: bytearray, tokens: Iterable[int]) -> bytes:
    """A mask without some tokens."""
    for token in tokens:
        bits[token // 8] &= ~(1 << token % 8) & 0xFF
    return bytes(bits)


def _set(bits: bytearray, token: int) -> None:
    bits[token // 8] |= 1 << token % 8
