"""Grammars with the library llguidance, which computes a mask in tens of microseconds. Imported only if it is used.

https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from evener.contracts.grammar.library import GrammarSpec, Matcher
from evener_generation.grammar_texts import check_length, choices_of, object_of, parts_of, quoted
from evener_generation.reasoning_tokens import SpecialTokens, with_reasoning
from evener_generation.structural_tags import in_lark, lark_of
from evener_generation.text_library import TextLibrary

#: Time and memory that one grammar may take; the library's own limits allow seconds. About 50,000 units of fuel are a
#: millisecond.
_LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, max_grammar_size=100_000, max_lexer_states=50_000)
#: Between the parts of a JSON text: a space, or a new line and what indents it. Without a bound, a model may write
#: nothing else; one that may write empty lines spends its tokens on them.
_WHITESPACE = r"[ \t]?(\r?\n[ \t]{0,64})?"
#: At the beginning of the library's errors in a grammar: where in its own source that was.
_NOISE = ("while parsing: ", "lexer error: ")


class LlguidanceLibrary(TextLibrary):
    """JSON schemas as https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md lists them, regular
    expressions of Rust's crate regex-syntax without look-around, Lark grammars without imports of files, grammars in
    llama.cpp's GBNF, and structural tags."""

    def __init__(self, tokenizer: str, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size)
        #: Special tokens, by the ids that end a text.
        self._special: dict[tuple[int, ...], SpecialTokens] = {}
        #: By the ids that end a text; all requests of one model have the same, so this holds one entry.
        self._opened: dict[tuple[int, ...], LLTokenizer] = {}
        #: The same tokenizers, prepared for the texts of JSON's strings: masks take a sixth less time.
        self._json: dict[tuple[int, ...], LLTokenizer] = {}

    @classmethod
    def _problem(cls, answer: GrammarSpec) -> str | None:
        failed, texts = LLMatcher.validate_grammar_with_warnings(_compiled(answer, {}), limits=_LIMITS)
        return _first_line(texts[0]) if failed else None

    def _compile(self, spec: GrammarSpec) -> Matcher:
        if spec.ends not in self._opened:
            ends = list(spec.ends) or None
            self._opened[spec.ends] = LLTokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=ends)
            self._json[spec.ends] = self._opened[spec.ends].with_slices(LLTokenizer.json_slices())
            self._special[spec.ends] = SpecialTokens(self._tokenizer, self._opened[spec.ends])
        tokenizer = self._opened[spec.ends]
        before, answer = parts_of(spec)
        found = None if answer is None else self._matcher(spec.ends, answer)
        if before is None and found is not None:
            return found
        return with_reasoning(tokenizer, self._special[spec.ends], self._vocab_size, before or {}, spec.ends, found)

    def _matcher(self, ends: tuple[int, ...], spec: GrammarSpec) -> Matcher:
        tokenizers = self._json if spec.kind == "json_schema" else self._opened
        matcher = LLMatcher(tokenizers[ends], _compiled(spec, self._special[ends]), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        return _LlguidanceMatcher(matcher, self._mask_bytes)

    @property
    def _mask_bytes(self) -> int:
        return 4 * -(-self._vocab_size // 32)


class _LlguidanceMatcher(Matcher):
    """The library's matcher. To copy it takes longer the longer its text is, to take tokens back does not.

    Args:
        matcher: at the beginning of the text, or behind ``text`` from ``start`` on.
    """

    def __init__(
        self, matcher: LLMatcher, mask_bytes: int, start: LLMatcher | None = None, text: Sequence[int] = ()
    ) -> None:
        self._matcher, self._mask_bytes, self._text = matcher, mask_bytes, list(text)
        self._start = start or matcher.deep_copy()
        # Written in place: the library's own bytes take half as long again.
        bits = np.zeros(mask_bytes, np.uint8)
        self._bits, self._address = memoryview(bits), bits.ctypes.data

    def copy(self) -> Matcher:
        return _LlguidanceMatcher(self._matcher.deep_copy(), self._mask_bytes, self._start, self._text)

    def mask(self) -> bytes:
        return bytes(self._write())

    def _write(self) -> memoryview:
        """The mask, in the memory that every mask of this matcher is written into."""
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask_bytes)
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))
        return self._bits

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._text.append(token)

    def fitting(self, tokens: list[int]) -> int:
        found = self._matcher.validate_tokens(tokens)
        self._take_back(0)
        return found

    def forced(self) -> list[int]:
        # The library leaves out the last tokens of the text that must come, if they could be joined with what follows.
        return [] if self._matcher.is_error() else list(self._matcher.compute_ff_tokens())

    def masks(self, tokens: list[int]) -> list[bytes] | list[memoryview]:
        if not tokens:
            return [self._write()]  # not copied: masks of all rows fill the processor's caches
        found = [self.mask()]
        for token in tokens[: self.fitting(tokens)]:
            self._matcher.consume_token(token)
            try:
                found.append(self.mask())
            except ValueError:  # a limit is reached behind this token
                break
        self._take_back(len(found) - 1)
        return found

    def _take_back(self, tokens: int) -> None:
        """The state behind the text again, which went on with so many tokens. After an error the library takes nothing
        back, and the text may go another way than the one that had it."""
        if not self._matcher.is_error():
            self._matcher.rollback(tokens)
            return
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._text)


def _compiled(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """The grammar in the library's own form.

    Raises:
        ValueError: it is too long, or not what its kind says.
    """
    check_length(spec)
    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(spec.text, defaults={"whitespace_pattern": _WHITESPACE})
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, choices_of(spec.text))))
    if spec.kind == "structural_tag":
        found = lark_of(object_of(spec.text), special, _WHITESPACE)
        return found if found.startswith("{") else LLMatcher.grammar_from_lark(found)
    return LLMatcher.grammar_from_lark(in_lark(spec.text))


def _first_line(text: str) -> str:
    """The library's error without its backtrace and its copy of the grammar."""
    lines = text.strip().splitlines() or ["the library gives no reason"]
    # An error in a regular expression is a picture of it, and then the reason.
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    line = f"{lines[0]} {reason}".strip()
    for noise in _NOISE:
        line = line.removeprefix(noise)
    return line[:300]
