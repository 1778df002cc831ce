"""A matcher for texts in which no sequence of so many tokens comes a second time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from evener.contracts.grammar.library import Matcher


class NoRepeats(Matcher):
    """What another matcher allows, but no token that completes a sequence which was there before. The sequences are
    those of transformers' ``no_repeat_ngram_size`` and ``encoder_no_repeat_ngram_size``: they may begin in the prompt.

    Args:
        sizes: as ``GrammarSpec.no_repeat``.
        prompt: ids of the prompt.
        inner: the other matcher, at the beginning of the text.
    """

    def __init__(self, sizes: tuple[int, int], prompt: Sequence[int], inner: Matcher) -> None:
        self._inner = inner
        self._of_all, self._of_prompt = map(_Sequences, sizes)
        #: Not read before the first mask is wanted: the device computes meanwhile.
        self._prompt: Sequence[int] = prompt
        self._text: list[int] = []

    def copy(self) -> Matcher:
        other = object.__new__(NoRepeats)
        other._inner, other._prompt, other._text = self._inner.copy(), self._prompt, list(self._text)
        other._of_all, other._of_prompt = self._of_all.copy(), self._of_prompt.copy()
        return other

    def mask(self) -> bytes:
        self._catch_up()
        bits = bytearray(self._inner.mask())
        for token in self._of_all.completing() | self._of_prompt.completing():
            if token >> 3 < len(bits):
                bits[token >> 3] &= ~(1 << (token & 7))
        if bits.count(0) == len(bits):
            raise ValueError("every token that may come next would repeat a sequence")
        return bytes(bits)

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._text.append(token)

    def _catch_up(self) -> None:
        for token in self._prompt:
            self._of_all.add(token)
            self._of_prompt.add(token)
        for token in self._text:
            self._of_all.add(token)
            self._of_prompt.move(token)
        self._prompt, self._text = (), []


class _Sequences:
    """Sequences of ``size`` tokens, by their beginning; 0: none. Most beginnings have one end, so a set is made for the
    second one: a prompt may have a hundred thousand tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens = array("i")
        self._ends: dict[bytes, int | set[int]] = {}

    def copy(self) -> _Sequences:
        other = _Sequences(self._size)
        other._tokens = self._tokens[:]
        other._ends = {begin: set(end) if isinstance(end, set) else end for begin, end in self._ends.items()}
        return other

    def add(self, token: int) -> None:
        """A token comes, and the sequence that it completes is one of these from now on."""
        if self._size and len(self._tokens) >= self._size - 1:
            begin = self._begin()
            end = self._ends.setdefault(begin, token)
            if isinstance(end, set):
                end.add(token)
            elif end != token:
                self._ends[begin] = {end, token}
        self.move(token)

    def move(self, token: int) -> None:
        """A token comes."""
        self._tokens.append(token)

    def completing(self) -> set[int]:
        """Tokens that would complete one of the sequences now."""
        end = self._ends.get(self._begin()) if self._ends else None
        return end if isinstance(end, set) else set() if end is None else {end}

    def _begin(self) -> bytes:
        """The last tokens, one fewer than a sequence has."""
        return self._tokens[len(self._tokens) - self._size + 1 :].tobytes()
