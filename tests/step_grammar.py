"""A small grammar library for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise, takewhile

import numpy as np

from evener.contracts.grammar.library import GrammarLibrary, GrammarSpec, Matcher
from evener_generation.proposed_tokens import masks_behind

VOCAB = 256
STEPS = GrammarSpec(kind="regex", text="steps")


class StepMatcher(Matcher):
    """Each id is 1 to 3 above the one before it; the first is 1 to 3."""

    def __init__(self, last: int = 0, most: int = VOCAB) -> None:
        self.last, self.most = last, most

    def copy(self) -> Matcher:
        return StepMatcher(self.last, self.most)

    def mask(self) -> bytes:
        if self.last >= self.most:
            raise ValueError("a limit was reached")
        bits = np.zeros(VOCAB, dtype=np.uint8)
        bits[self.last + 1 : self.last + 4] = 1
        return bytes(np.packbits(bits, bitorder="little"))

    def accept(self, token: int) -> None:
        if self.last < self.most:
            assert token in range(self.last + 1, self.last + 4), "an id that the mask does not allow"
        self.last = token

    def fitting(self, tokens: list[int]) -> int:
        return len(list(takewhile(lambda pair: 1 <= pair[1] - pair[0] <= 3, pairwise([self.last, *tokens]))))

    def masks(self, tokens: list[int]) -> list[bytes]:
        return masks_behind(self.copy(), tokens)


class Steps(GrammarLibrary):
    """``slow`` is compiled when ``go_on`` is set; ``short`` reaches a limit; ``wrong`` is refused; ``broken`` raises
    what the contract does not name."""

    def __init__(self, tokenizer: str = "", vocab_size: int = VOCAB) -> None:
        self.go_on, self.compiled = threading.Event(), list[str]()

    @classmethod
    def problem(cls, spec: GrammarSpec) -> str | None:
        return None

    def compile(self, spec: GrammarSpec) -> Matcher:
        if spec.text == "slow":
            assert self.go_on.wait(120)
        if spec.text == "wrong":
            raise ValueError("there is no such grammar")
        if spec.text == "broken":
            raise RuntimeError("the library has failed")
        self.compiled.append(spec.text)
        return StepMatcher(most=9 if spec.text == "short" else VOCAB)


def follows(ids: Sequence[int]) -> bool:
    return all(1 <= after - before <= 3 for before, after in zip([0, *ids], ids, strict=False))
