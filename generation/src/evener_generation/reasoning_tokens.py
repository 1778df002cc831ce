"""Reasoning before an answer, in a model's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer

from evener.contracts.grammar.library import Matcher
from evener_generation.after_reasoning import AfterReasoning, Reasoning


class SpecialTokens(dict[str, int]):
    """Ids by their texts of those tokens that the library does not take for text: special ones, and some others between
    angle brackets, such as Qwen's ``<tool_call>``."""

    def __init__(self, tokenizer: str, opened: LLTokenizer) -> None:
        added = json.loads(tokenizer).get("added_tokens") or ()
        super().__init__({each["content"]: each["id"] for each in added if opened.is_special_token(each["id"])})
        self._opened = opened

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest text."""
        return max((len(text.encode()) for text in self), default=0)

    @property
    def ids(self) -> Sequence[int]:
        """Of all of them."""
        return [*self.values()]

    def completing(self, tail: bytes) -> Iterable[int]:
        """As of ``Marks``."""
        rests, tokens = self._completions
        ends = (tail[-size:] for size in range(min(len(tail), self.longest - 1), 0, -1))
        return [*tokens.get(b"", ()), *(token for end in ends for rest in rests.get(end, ()) for token in tokens[rest])]

    @cached_property
    def _completions(self) -> tuple[dict[bytes, list[bytes]], dict[bytes, list[int]]]:
        """For each begin of a text what is left of it, and the tokens that begin with that; those with "" have all of a
        text. Takes tenths of a second for a large vocabulary, once."""
        texts = [text.encode() for text in self]
        cuts = {(text[:at], text[at:]) for text in texts for at in range(1, len(text))}
        known, own, tokens = {rest for _, rest in cuts}, set(self.values()), dict[bytes, list[int]]()
        whole = re.compile(b"|".join(map(re.escape, texts)))
        for token in range(self._opened.vocab_size):
            if token in own:
                continue
            text = self._opened.decode_bytes([token])
            begins = {text[:size] for size in range(1, 1 + min(len(text), self.longest))} & known
            for rest in begins | ({b""} if texts and whole.search(text) else set()):
                tokens.setdefault(rest, []).append(token)
        rests: dict[bytes, list[bytes]] = {}
        for begin, rest in cuts:
            if rest in tokens:
                rests.setdefault(begin, []).append(rest)
        return rests, tokens


def with_reasoning(
    tokenizer: LLTokenizer, special: SpecialTokens, vocab_size: int, before: Mapping[str, Any],
    ends: Sequence[int], answer: Matcher | None,
) -> Matcher:  # fmt: skip
    """Reasoning, and then the answer.

    Args:
        special: the tokenizer's.
        before: the reasoning of a structural tag, as in ``GrammarSpec``.
        ends: ids that end a text.
        answer: the matcher of the answer; None: any.
    """

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.tokenize_str(text, parse_special=True))

    def read(token: int) -> bytes:
        marks = [text for text, each in special.items() if each == token]
        return marks[0].encode() if marks else tokenizer.decode_bytes([token])

    reasoning = Reasoning(
        begin=ids(before.get("begin", "")), end=before["end"].encode(), end_ids=ids(before["end"]),
        budget=before.get("budget"), mask_bytes=4 * -(-vocab_size // 32), vocab_size=vocab_size, ends=tuple(ends),
        read=read, write=tokenizer.tokenize_bytes,
        marks=special if len(set(ids(before["end"])) & {*special.values()}) > 1 else None,
    )  # fmt: skip
    return AfterReasoning(reasoning, answer)
