"""Reasoning before an answer, in a model's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLTokenizer

from evener.contracts.grammar.library import Matcher
from evener_generation.after_reasoning import AfterReasoning, Reasoning


def special_tokens(tokenizer: str, opened: LLTokenizer) -> dict[str, int]:
    """Ids by their texts of those tokens that the library does not take for text: special ones, and some others between
    angle brackets, such as Qwen's ``<tool_call>``."""
    added = json.loads(tokenizer).get("added_tokens") or ()
    return {each["content"]: each["id"] for each in added if opened.is_special_token(each["id"])}


def with_reasoning(
    tokenizer: LLTokenizer, special: Mapping[str, int], vocab_size: int, before: Mapping[str, Any],
    ends: Sequence[int], answer: Matcher | None,
) -> Matcher:  # fmt: skip
    """Reasoning, and then the answer.

    Args:
        special: those of ``special_tokens``.
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
    )  # fmt: skip
    return AfterReasoning(reasoning, answer)
