"""What the grammar libraries share: free text needs no grammar, and forbidden tokens are added to any grammar."""

from __future__ import annotations

from abc import abstractmethod

from evener.contracts.grammar.library import GrammarLibrary, GrammarSpec, Matcher
from evener_generation.forbidden_tokens import ForbiddenTokens
from evener_generation.grammar_texts import parts_of


class TextLibrary(GrammarLibrary):
    """A library whose subclass knows how to hold a text to a form."""

    def __init__(self, tokenizer: str, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    @classmethod
    def problem(cls, spec: GrammarSpec) -> str | None:
        if spec.kind == "any":
            return None
        try:
            _, answer = parts_of(spec)
            return None if answer is None else cls._problem(answer)
        except ValueError as error:
            return str(error)

    def compile(self, spec: GrammarSpec) -> Matcher:
        held = None if spec.kind == "any" else self._compile(spec)
        if held is not None and not spec.forbidden:
            return held
        return ForbiddenTokens(spec.forbidden, self._vocab_size, held)

    @classmethod
    @abstractmethod
    def _problem(cls, answer: GrammarSpec) -> str | None:
        """Why the library cannot compile ``answer``, a form without reasoning before it.

        Raises:
            ValueError: the same, as an error.
        """

    @abstractmethod
    def _compile(self, spec: GrammarSpec) -> Matcher:
        """A matcher for a form, with the reasoning that may come before it."""
