"""A matcher that allows no sequence of N tokens a second time (``no_repeat_ngram_size``)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from evener.contracts.grammar.library import Matcher

#: Tokens in a set from which on their bits are kept.
_MANY = 64


class PromptSequences:
    """The sequences of one prompt, which all samples of a request share: they are made for the first mask, when the
    device computes, and not changed afterwards.

    Args:
        sizes: as ``GrammarSpec.no_repeat``.
        prompt: ids of the prompt.
    """

    def __init__(self, sizes: tuple[int, int], prompt: Sequence[int]) -> None:
        self.sizes, self._prompt = sizes, prompt
        self._made: tuple[_Sequences, _Sequences] | None = None
        self._bits: dict[tuple[int, bytes], int] = {}

    def made(self) -> tuple[_Sequences, _Sequences]:
        """The sequences of each size."""
        if self._made is None:
            self._made = _Sequences(self.sizes[0]), _Sequences(self.sizes[1])
            for token in self._prompt:
                for each in self._made:
                    each.add(token)
            self._prompt = ()
        return self._made

    def completing(self, which: int, begin: bytes) -> int:
        """A bit for each token that would complete one of the sequences of a size after ``begin``."""
        key = which, begin
        if (found := self._bits.get(key)) is None:
            ends = self.made()[which].completing(begin)
            found = _bits(ends)
            if len(ends) > _MANY:
                self._bits[key] = found
        return found


class NoRepeats(Matcher):
    """What another matcher allows, but no token that completes a sequence which was there before. The sequences are
    those of transformers' ``no_repeat_ngram_size`` and ``encoder_no_repeat_ngram_size``: they may begin in the prompt.

    Args:
        prompt: the sequences of the prompt.
        inner: the other matcher, at the beginning of the text.
    """

    def __init__(self, prompt: PromptSequences, inner: Matcher) -> None:
        self._inner, self._prompt = inner, prompt
        #: Sequences that end in the text, and the tokens to continue a sequence with; None: no mask was wanted yet.
        self._own: tuple[_Sequences, _Sequences] | None = None
        self._text: list[int] = []

    def copy(self) -> Matcher:
        other = NoRepeats(self._prompt, self._inner.copy())
        other._own, other._text = self._own and (self._own[0].copy(), self._own[1].copy()), list(self._text)
        return other

    def mask(self) -> bytes:
        return self._masked(self._inner.mask(), *self._ahead())

    def fitting(self, tokens: list[int]) -> int:
        return self._inner.fitting(tokens)

    def masks(self, tokens: list[int]) -> list[bytes]:
        inner: Sequence[bytes | memoryview] = self._inner.masks(tokens)
        of_all, of_prompt = self._ahead()
        found = [self._masked(inner[0], of_all, of_prompt)]
        for token, mask in zip(tokens, inner[1:], strict=False):
            if not found[-1][token >> 3] >> (token & 7) & 1:
                break
            of_all.add(token)
            of_prompt.move(token)
            try:
                found.append(self._masked(mask, of_all, of_prompt))
            except ValueError:  # the text cannot go on behind this token
                break
        return found

    def _ahead(self) -> tuple[_Sequences, _Sequences]:
        """None yet, behind the text: what proposed tokens are added to."""
        of_all, of_prompt = self._catch_up()
        return of_all.behind(), of_prompt.behind()

    def _masked(self, inner: bytes | memoryview, *ahead: _Sequences) -> bytes:
        """The other matcher's mask without what would complete a sequence: of the text, of those ``ahead``, or of the
        prompt.

        Raises:
            ValueError: nothing is left.
        """
        forbidden = _bits(self._catch_up()[0].completing(ahead[0].begin()) | ahead[0].completing())
        for which, each in enumerate(ahead):
            forbidden |= self._prompt.completing(which, each.begin())
        bits = int.from_bytes(inner, "little") & ~forbidden
        if not bits:
            raise ValueError("every token that may come next would repeat a sequence")
        return bits.to_bytes(len(inner), "little")

    def accept(self, token: int) -> None:
        self._inner.accept(token)
        self._text.append(token)

    def _catch_up(self) -> tuple[_Sequences, _Sequences]:
        if self._own is None:
            of_all, of_prompt = self._prompt.made()
            self._own = of_all.behind(), of_prompt.behind()
        for token in self._text:
            self._own[0].add(token)
            self._own[1].move(token)
        self._text = []
        return self._own


def _bits(tokens: Iterable[int]) -> int:
    tokens = list(tokens)
    data = bytearray((max(tokens, default=-1) >> 3) + 1)
    for token in tokens:
        data[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(data, "little")


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
            begin = self.begin()
            end = self._ends.setdefault(begin, token)
            if isinstance(end, set):
                end.add(token)
            elif end != token:
                self._ends[begin] = {end, token}
        self.move(token)

    def move(self, token: int) -> None:
        """A token comes."""
        self._tokens.append(token)

    def behind(self) -> _Sequences:
        """None yet, behind the same tokens."""
        other = _Sequences(self._size)
        other._tokens = self._tokens[max(len(self._tokens) - self._size + 1, 0) :] if self._size else array("i")
        return other

    def completing(self, begin: bytes | None = None) -> set[int]:
        """Tokens that would complete one of the sequences after ``begin``; None: now."""
        end = self._ends.get(self.begin() if begin is None else begin) if self._ends else None
        return end if isinstance(end, set) else set() if end is None else {end}

    def begin(self) -> bytes:
        """The last tokens, one fewer than a sequence has."""
        return self._tokens[max(len(self._tokens) - self._size + 1, 0) :].tobytes()
