"""A text is refused by its bytes only where no text of that length can have few enough tokens."""

from __future__ import annotations

import math
import sys
import unicodedata

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from evener.frontend.tokenizer import Tokenizer
from evener_formats.tokenizers.text_bound import _SHRINKING
from evener_formats.tokenizers.vocabulary import FastVocabulary

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NFKC, COLLAPSE = normalizers.NFKC(), normalizers.Replace(Regex(" +"), " ")


def byte_level(normalizer: normalizers.Normalizer | None = None, **added: bool) -> Tokenizer:
    """One token for each byte, and ``<x>``."""
    library = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_special_tokens([AddedToken("<x>", **added)])
    return Tokenizer(FastVocabulary(library), {})


def of_model(model: models.Model, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    return Tokenizer(FastVocabulary(library), {})


FEW = {"a": 0, "b": 1, "?": 2}


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (byte_level(NFKC), "\U0001d400" * 40),  # bold letters, of four bytes each, become plain ones
        (byte_level(normalizers.Sequence([normalizers.NFC(), COLLAPSE])), "a" + " " * 100_000 + "b"),
        (byte_level(normalizers.Strip()), " " * 100_000 + "a"),
        (byte_level(normalizers.StripAccents()), "a" + "\u0301" * 100_000),
        (byte_level(normalizers.Replace("aaaaaaaa", "b")), "a" * 80 * 8),
        (byte_level(lstrip=True), " " * 100_000 + "<x>"),
        (of_model(models.BPE(FEW, [])), "-" * 100_000 + "a"),  # what it does not know is left out
        (of_model(models.BPE(FEW, [], unk_token="?", fuse_unk=True)), "-" * 100_000 + "a"),
        (of_model(models.WordPiece(FEW, unk_token="?")), "a" * 100_000),
        (of_model(models.Unigram([("?", -1.0), ("a", -2.0)], 0)), "-" * 100_000),
        (of_model(models.BPE(FEW, [], unk_token="?"), pre_tokenizers.WhitespaceSplit()), "a" + " " * 100_000),
        (of_model(models.BPE(FEW, [], unk_token="?"), pre_tokenizers.Split("-", "removed")), "a" + "-" * 100_000),
    ],
)
def test_a_text_that_a_tokenizer_shrinks_is_not_refused(tokenizer: Tokenizer, text: str) -> None:
    count = len(tokenizer.encode(text))
    assert count <= 80 < len(text.encode())
    assert not tokenizer.exceeds(text, 80)


@pytest.mark.parametrize(
    ("tokenizer", "most"),
    [
        (byte_level(), 4),
        (byte_level(normalizers.NFC()), 16),
        (byte_level(normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])), 4),
        (byte_level(normalizers.Replace("aaaaaaaa", "b")), 32),
        (of_model(models.BPE(FEW, [], unk_token="?")), 4),
        (byte_level(COLLAPSE), math.inf),
    ],
)
def test_other_texts_are_refused_by_their_length_alone(
    tokenizer: Tokenizer, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer.most_bytes == most
    if most < math.inf:
        monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was encoded"))
        assert tokenizer.exceeds("a" * int(80 * most + 1), 80)


def test_of_a_hostile_text_that_could_shrink_only_the_beginning_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encode, sizes = byte_level(COLLAPSE), Tokenizer.encode, list[int]()

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    assert tokenizer.exceeds("a " * 2_000_000, 80)
    assert sum(sizes) < 20_000


@pytest.mark.parametrize("form", ["NFC", "NFKD", *(pytest.param(f, marks=pytest.mark.slow) for f in ("NFD", "NFKC"))])
def test_no_character_shrinks_more_than_its_normal_form_is_said_to(form: str) -> None:
    """Sequences are composed too: three Hangul letters, and Greek letters with three marks."""
    every = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000 and chr(i).isprintable()]
    every += [unicodedata.normalize("NFD", each) for each in every]
    worst = max(len(e.encode()) / max(1, len(unicodedata.normalize(form, e).encode())) for e in every)
    assert worst <= _SHRINKING[form]
    assert max(len(e.encode()) / len(e.lower().encode()) for e in every) <= _SHRINKING["Lowercase"]
