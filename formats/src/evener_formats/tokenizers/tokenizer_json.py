"""Parts of a ``tokenizer.json`` that all converters share. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class MadeTokenizer:
    """Model files whose ``json("tokenizer.json")`` is made from something else: its text would be written only to be
    read again, which takes a second for a large vocabulary."""


def added_token(number: int, text: str, *, special: bool = True, single_word: bool = False) -> dict[str, Any]:
    """A token that is found in a text before it is normalized and split; ``single_word``: not inside a word."""
    return {
        "id": number, "content": text, "single_word": single_word, "lstrip": False, "rstrip": False,
        "normalized": False, "special": special,
    }  # fmt: skip


def template_processing(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that adds tokens (with their ids) before and after a text; None without any."""
    if not before and not after:
        return None
    single: list[dict[str, Any]] = [
        *({"SpecialToken": {"id": text, "type_id": 0}} for text in before),
        {"Sequence": {"id": "A", "type_id": 0}},
        *({"SpecialToken": {"id": text, "type_id": 0}} for text in after),
    ]
    return {
        "type": "TemplateProcessing", "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for text, number in {**before, **after}.items()
        },
    }  # fmt: skip


def bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    """The model: ids by token, and the pairs that are merged into one token, in order of priority."""
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": merges, **more,
    }  # fmt: skip


def assemble(added: Sequence[Mapping[str, Any]], **parts: Any) -> dict[str, Any]:
    """The whole file; ``parts`` are ``normalizer``, ``pre_tokenizer``, ``model``, ``post_processor`` and ``decoder``,
    each may be None."""
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
