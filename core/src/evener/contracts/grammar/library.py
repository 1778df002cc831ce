"""The grammar contract: a library that compiles grammars for one tokenizer, and finds which tokens may come next.

Announce a class in ``Descriptor.grammars``. There is one object for each engine. Its methods are called by several
threads, but never two of them for one matcher. Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import msgspec


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a text has to be.

    Attributes:
        kind: how ``text`` is to be read: a JSON schema, a regular expression for the whole text, a JSON list of texts
            of which one is chosen, a grammar in Lark's syntax or in GBNF, or a structural tag. That is a JSON object:
            ``format`` is the answer's, as in ``evener.contracts.writing``; ``reasoning`` (optional) describes text that
            may precede the answer: ``{"begin": …, "end": …, "budget": …}`` as in ``ReasoningFormat``, the last in
            tokens. Without ``format`` the answer is free. ``marks``: special tokens that free text in it may have.
            ``any``: any text, and the request's ``ignore_eos`` holds.
        text: the grammar.
        ends: ids of the tokens that end a text; they are allowed where the text is complete. The front end sets them.
        forbidden: sequences of token ids, none empty, that must not be generated even where the grammar allows them.
        no_repeat: ``(a, b)``: no sequence of a tokens may come that the prompt and the text have already, and none of
            b tokens that the prompt has; 0: any may. Libraries need not look at it.
    """

    kind: Literal["json_schema", "regex", "choice", "lark", "structural_tag", "any"]
    text: str
    ends: tuple[int, ...] = ()
    forbidden: tuple[tuple[int, ...], ...] = ()
    no_repeat: tuple[int, int] = (0, 0)


class Matcher(ABC):
    """The state of one text.

    It may have a method ``forced() -> list[int]`` too: ids that are likely to come next because the grammar leaves no
    other text. They are proposed as drafts, so that the model may still write the text in other tokens. It takes
    microseconds.
    """

    @abstractmethod
    def copy(self) -> Matcher:
        """A matcher in the same state, for another text."""

    @abstractmethod
    def mask(self) -> bytes:
        """Which ids may come next: little-endian int32 [ceil(vocabulary / 32)]; bit i of word w stands for 32 w + i.

        Raises:
            ValueError: the text cannot go on, because a limit of the library is reached or a wrong token came.
        """

    @abstractmethod
    def accept(self, token: int) -> None:
        """The text goes on with ``token``. Nothing is raised: the next ``mask`` does."""

    def fitting(self, tokens: list[int]) -> int:
        """(optional) How many of ``tokens``, which were proposed, may come next, from the first on; the rest is not
        computed. The number may be too large. Takes microseconds. Default: none, so that nothing is proposed."""
        return 0

    def masks(self, tokens: list[int]) -> list[bytes] | list[memoryview]:
        """(optional) The mask, and the one after each of ``tokens``, as if they came. Ends at the first token that may
        not come, or after which the text cannot go on. The state stays as it is. Default: the mask alone.

        A memoryview may change with the matcher's next mask, which is made after the step with this one was read.

        Raises:
            ValueError: as ``mask``.
        """
        return [self.mask()]


class GrammarLibrary(ABC):
    """Compiles grammars. A library has a constructor with these arguments.

    Args:
        tokenizer: the content of the model's ``tokenizer.json``.
        vocab_size: ids of the model, of which the last may have no token.
    """

    def __init__(self, tokenizer: str, vocab_size: int) -> None: ...  # noqa: B027  # for its types

    @classmethod
    @abstractmethod
    def problem(cls, spec: GrammarSpec) -> str | None:
        """Why the library cannot compile ``spec``; None if it can. Needs no tokenizer."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Matcher:
        """A matcher at the beginning of a text.

        Raises:
            ValueError: the library does not support the grammar; the message says what of it.
        """
