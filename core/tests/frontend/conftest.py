"""Small real tokenizers, built here."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from evener.frontend.tokenizer import Tokenizer
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer
from evener_formats.tokenizers.vocabulary import FastVocabulary, SlowVocabulary

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "zażółć gęślą jaźń",
    "你好世界 你好",
    "def f(x):\n    return x",
    "😀😃 é è",
]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte tokenizer, a ChatML template and EOS 258."""
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def byte_level_library() -> tokenizers.Tokenizer:
    """Byte-level BPE with merges, two special tokens and an added one that is not special."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    library.add_special_tokens(["<eos>", "<pad>"])
    library.add_tokens(["<tool call>"])
    return library


@pytest.fixture(scope="session")
def byte_fallback_library() -> tokenizers.Tokenizer:
    """As converted from sentencepiece: a marker for spaces, byte fallback, a first space that decoding takes away."""
    words = ["▁", "▁the", "the", "qu", "ick", "▁fox", "a", "b", "c", "é", "你", "x"]
    vocab = {
        token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    }
    library = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


@pytest.fixture(scope="session")
def wordpiece_library() -> tokenizers.Tokenizer:
    """A decoder under which a token has no bytes of its own."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "play", "##ing", "##ed", "the", "dog", "."])}
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=False)
    library.add_special_tokens(["[UNK]", "[CLS]"])
    return library


@pytest.fixture(scope="session")
def byte_level(byte_level_library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(FastVocabulary(byte_level_library), {"eos_token": "<eos>"})


@pytest.fixture(scope="session")
def byte_fallback(byte_fallback_library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(FastVocabulary(byte_fallback_library), {})


@pytest.fixture(scope="session")
def wordpiece(wordpiece_library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(FastVocabulary(wordpiece_library), {})


@pytest.fixture(scope="session")
def slow() -> Tokenizer:
    """Bytes again, but written in Python: a decoder that leaves incomplete characters out instead of replacing them."""
    import transformers

    return Tokenizer(SlowVocabulary(transformers.ByT5Tokenizer()), {"eos_token": "</s>"})
