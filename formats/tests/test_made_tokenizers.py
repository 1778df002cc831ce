"""Tokenizers of GGUF files, which have no ``tokenizer.json``: the library gets their parts without its text."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError
from evener.loading.checkpoint import open_files
from evener_formats.gguf.header import read_header
from evener_formats.tokenizers import merge_cache
from evener_formats.tokenizers.merge_cache import MergeCache
from evener_formats.tokenizers.sentencepiece_bpe import BYTE, CONTROL, NORMAL, UNKNOWN, USER, Pieces
from evener_formats.tokenizers.vocabulary import from_parts, read_tokenizer

Write = Callable[..., Path]
PIECES = ["<unk>", "<s>", "</s>", "<tool>", "<0x0A>", "▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab"]
TYPES = [2, CONTROL, CONTROL, USER, BYTE, *[NORMAL] * 9]
SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -6.0, -1.0, -2.0, -3.0, -2.0, -1.0]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.scores": SCORES, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("keys", [{}, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_a_tokenizer_of_parts_is_the_one_of_the_text(keys: dict[str, Any], write_gguf: Write) -> None:
    files = open_files(write_gguf("llama", {}, {}, **keys))
    text = files.text("tokenizer.json")
    assert text is not None
    assert from_parts(files.json("tokenizer.json")).to_str() == tokenizers.Tokenizer.from_str(text).to_str()


def test_a_file_is_found_by_its_name_without_being_made(write_gguf: Write) -> None:
    files = open_files(write_gguf("llama", {}, {}))
    assert files.names("tokenizer.json") == ["tokenizer.json"] and files.names("*.model") == []


def test_the_text_of_a_gguf_tokenizer_is_not_written_to_be_read(
    write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(write_gguf("llama", {}, {}, **SENTENCEPIECE))
    monkeypatch.setattr(type(files), "text", lambda self, name: pytest.fail(f"the text of {name} was written"))
    made = read_tokenizer(files)
    assert made is not None and made.vocabulary.encode("abc<tool>", True)[0] == 1


HARMONY = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|message|>"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("HelloWorld camelCase", ["Hello", "World", "Ġcamel", "Case"]),
        ("HTTPServer ABC I'LL", ["HTTPServer", "ĠABC", "ĠI'LL"]),
        ("don't 1234567", ["don't", "Ġ", "123", "456", "7"]),
        ("a//\n/b  c", ["a", "//Ċ/", "b", "Ġ", "Ġc"]),
    ],
)
def test_words_of_gpt_oss_begin_where_letters_turn_from_small_to_capital(
    text: str, words: list[str], write_gguf: Write
) -> None:
    files = open_files(write_gguf("llama", {}, {}, **{"tokenizer.ggml.pre": "gpt-4o"}))
    made = read_tokenizer(files)
    assert made is not None
    splits = tokenizers.Tokenizer.from_str(files.text("tokenizer.json") or "").pre_tokenizer
    assert [word for word, _ in splits.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("missing", "ends"),
    [("", ["<|return|>", "<|endoftext|>", "<|call|>"]), ("<|call|>", ["<|return|>", "<|endoftext|>", "<|end|>"])],
)
def test_the_end_of_a_message_ends_no_answer_of_gpt_oss(missing: str, ends: list[str], write_gguf: Write) -> None:
    tokens = [token for token in HARMONY if token != missing]
    files = open_files(write_gguf("llama", {}, {}, **{
        "tokenizer.ggml.tokens": ["a", *tokens], "tokenizer.ggml.token_type": [NORMAL, *[CONTROL] * len(tokens)],
        "tokenizer.ggml.eos_token_id": 1 + tokens.index("<|return|>"), "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eot_token_id": 1 + tokens.index("<|end|>"), "tokenizer.ggml.bos_token_id": 0,
    }))  # fmt: skip
    found = files.json("generation_config.json")["eos_token_id"]
    assert sorted(tokens[number - 1] for number in found) == sorted(ends)


def byte_level(write_gguf: Write, merges: list[str]) -> ModelFiles:
    tokens = ["a", "b", "ab", "aba", "b b"]
    return open_files(write_gguf("llama", {}, {}, **{
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [NORMAL] * len(tokens),
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": merges,
    }))  # fmt: skip


def test_merges_of_a_file_are_texts_of_its_vocabulary_without_those_of_unknown_tokens(write_gguf: Write) -> None:
    model = byte_level(write_gguf, ["a b", "a c", "c a", "b a", "ab a"]).json("tokenizer.json")["model"]
    assert model["merges"] == [("a", "b"), ("ab", "a")]
    # The same objects: a copy for each merge would take tens of megabytes.
    known = {id(text) for text in model["vocab"]}
    assert all(id(text) in known for merge in model["merges"] for text in merge)


def test_a_merge_of_one_token_is_an_error(write_gguf: Write) -> None:
    with pytest.raises(CheckpointError, match="a merge of its tokenizer is not two tokens"):
        byte_level(write_gguf, ["a b", "ab"]).json("tokenizer.json")


def test_a_header_in_use_is_read_once(write_gguf: Write) -> None:
    path = write_gguf("llama", {}, {})
    first = read_header(path)
    assert read_header(path) is first
    os.utime(path, ns=(1, 1))
    assert read_header(path) is not first


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pieces]:
    """A vocabulary whose merges are kept in a folder of its own, ``tmp_path/evener/tokenizers``."""
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield Pieces(PIECES, SCORES, TYPES)


def merges(pieces: Pieces) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = pieces.model("<unk>")["merges"]
    return found


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "evener/tokenizers").iterdir())


def test_merges_of_a_large_vocabulary_are_kept_and_the_same(
    large: Pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In no text do ("▁a", "b") and ("a", "bc") happen: "a" and "b" are merged before.
    expected = [("▁", "ab"), ("a", "b"), ("▁", "a"), ("b", "c"), ("ab", "c")]
    assert merges(large) == expected
    assert len(kept(tmp_path)) == 1
    monkeypatch.setattr(Pieces, "_pairs", lambda self: pytest.fail("the merges were computed again"))
    assert merges(Pieces(PIECES, SCORES, TYPES)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_merges_that_are_left_out_happen_in_no_text(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vocabularies without any order, in which pieces overlap, some have characters that are no pieces, and some
    have the spelling of a byte inside."""
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drawn = random.Random(seed)
    bytes_ = [f"<0x{byte:02X}>" for byte in (*b"d", *"é".encode())]
    words = {"".join(drawn.choices("aabbcdé", k=drawn.randint(2, 5))) for _ in range(150)}
    # Made of its characters, and of a byte ("d", which is no piece) and a letter.
    spelled = ["<0", "<0x", "<0x6", "<0x64", ">a", "<0x64>a", *"<0x64>"]
    pieces = ["<unk>", "<s>", *bytes_, "a", "b", "c", *sorted(words), *dict.fromkeys(spelled), "a" * 65, "a" * 64]
    types = [UNKNOWN, CONTROL, *[BYTE] * 3, *[NORMAL] * (len(pieces) - 5)]
    one = Pieces(pieces, [float(drawn.randint(-9, 9)) for _ in pieces], types)
    pruned = one.model("<unk>")
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", 1000)
    whole = one.model("<unk>")
    assert set(pruned["merges"]) < set(whole["merges"])
    first, second = (
        tokenizers.Tokenizer(tokenizers.models.BPE(**{k: v for k, v in each.items() if k != "type" and v is not None}))
        for each in (pruned, whole)
    )
    for _ in range(200):
        text = "".join(drawn.choices("aaabbcdé", k=drawn.randint(1, 80)))
        assert first.encode(text).ids == second.encode(text).ids


def test_another_vocabulary_has_merges_of_its_own(large: Pieces, tmp_path: Path) -> None:
    merges(large)
    other = [*SCORES[:-1], 5.0]
    assert merges(Pieces(PIECES, other, TYPES))[0] == ("▁", "ab")
    assert merges(Pieces(PIECES, SCORES, [*TYPES[:-1], CONTROL])) != merges(large)
    assert len(kept(tmp_path)) == 3


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\1" + data[1:], lambda data: b""])
def test_a_damaged_file_of_merges_is_made_again(
    large: Pieces, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    expected = merges(large)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert merges(large) == expected and file.read_bytes() == whole


def test_a_file_of_merges_that_others_may_write_is_not_read(large: Pieces, tmp_path: Path) -> None:
    merges(large)
    (file,) = kept(tmp_path)
    file.chmod(0o666)
    cache = MergeCache.of(large.texts, large.scores, large.types)
    assert cache is not None and cache.read() is None


def test_ids_outside_the_vocabulary_are_not_used(large: Pieces) -> None:
    cache = MergeCache.of(large.texts, large.scores, large.types)
    assert cache is not None
    cache.write(np.array([[0, len(PIECES)]], dtype=np.int32))
    assert cache.read() is None


def test_the_folder_of_merges_has_a_bound(large: Pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_cache, "MOST_FILES", 2)
    for number in range(4):
        merges(Pieces(PIECES, [float(number), *SCORES[1:]], TYPES))
    assert len(kept(tmp_path)) == 2


def test_without_room_for_merges_they_are_computed(large: Pieces, tmp_path: Path) -> None:
    (tmp_path / "evener").write_text("a file where the folder would be")
    assert json.dumps(merges(large))


def test_a_full_disk_is_left_without_parts_of_files(large: Pieces, tmp_path: Path) -> None:
    merges(large)
    for file in kept(tmp_path):
        file.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        assert merges(large)
    finally:
        signal.signal(signal.SIGXFSZ, handled)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept(tmp_path) == []


def test_merges_that_would_not_be_read_again_are_not_kept(
    large: Pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_cache, "_MOST_MERGES", 3)
    assert len(merges(large)) == 5 and not (tmp_path / "evener").exists()


def test_a_token_so_long_that_its_merges_take_for_ever_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a token of the vocabulary has 5,000 characters, and at most 1,024"):
        Pieces(["<unk>", "a" * 5000], [0.0, 0.0], [UNKNOWN, NORMAL]).model("<unk>")
