"""A tiny tokenizer of BERT's kind in a folder, for tests: whole words and letters, pairs with their token types."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = ["who", "are", "you", "me", "the", "quick", "brown", "fox", "?", "!"]


def write_wordpiece(folder: Path, marks: tuple[str, str] = ("[CLS]", "[SEP]"), twice: bool = False) -> Any:
    """Write ``tokenizer.json``; returns transformers' tokenizer of it.

    Args:
        marks: written before a text and behind it.
        twice: whether two of the latter are between the texts of a pair, all of one type, as RoBERTa has it.
    """
    import transformers

    first, last = marks
    letters = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    entries = ["[PAD]", "[UNK]", first, last, *WORDS, *letters]
    vocabulary = {entry: place for place, entry in enumerate(entries)}
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(["[PAD]", "[UNK]", first, last])
    between = f"{last} {last} $B {last}" if twice else f"{last} $B:1 {last}:1"
    library.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {between}",
        special_tokens=[(mark, vocabulary[mark]) for mark in marks],
    )  # fmt: skip
    library.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": first, "sep_token": last, "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=library, pad_token="[PAD]", cls_token=first, sep_token=last)
