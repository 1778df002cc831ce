"""Qwen 1's ``qwen.tiktoken`` and GLM-4-9B's ``tokenizer.model``, which is tiktoken's, too: the ids are those of the
published rule, lowest rank first, written again here."""

from __future__ import annotations

import base64
import itertools
import json
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import CheckpointError
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files
from evener_formats.tokenizers.qwen_tokenizer import FILE
from evener_models.chatglm import ChatGLMModel
from evener_models.qwen import QWenLMHeadModel

CORPUS = "the theatre of the thunder, there and then 1234 1212 世界 世间 Ünder über the other weather's we're".encode()


def trained(size: int = 310) -> list[bytes]:
    """Bytes, then the most frequent pairs of a small text: tokens in the order of their ranks."""
    tokens, text = [bytes([byte]) for byte in range(256)], [bytes([byte]) for byte in CORPUS]
    while len(tokens) < size:
        (left, right), _ = Counter(itertools.pairwise(text)).most_common(1)[0]
        tokens.append(left + right)
        joined: list[bytes] = []
        for piece in text:
            if joined and joined[-1] == left and piece == right:
                joined[-1] += piece
            else:
                joined.append(piece)
        text = joined
    return list(dict.fromkeys(tokens))


RANKS = {token: rank for rank, token in enumerate(trained())}


def by_the_rule(word: bytes) -> list[int]:
    """The published loop: join the neighbours whose union has the lowest rank, until none has one."""
    parts = [word[at : at + 1] for at in range(len(word))]
    while True:
        pairs = [RANKS.get(left + right) for left, right in itertools.pairwise(parts)]
        ranked = [rank for rank in pairs if rank is not None]
        if not ranked:
            return [RANKS[part] for part in parts]
        at = pairs.index(min(ranked))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (path / FILE).write_text("\n".join(lines) + "\n")
    (path / "config.json").write_text(json.dumps(QWenLMHeadModel.tiny_config()))
    (path / "generation_config.json").write_text(json.dumps({"chat_format": "chatml", "eos_token_id": len(RANKS)}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    found = Tokenizer.of(QWenLMHeadModel.text_files(open_files(folder)))
    assert found is not None
    return found


@given(st.text(alphabet="the aründ世界间", min_size=1, max_size=30).map(str.strip).filter(lambda t: " " not in t and t))
def test_a_word_is_joined_lowest_rank_first(tokenizer: Tokenizer, word: str) -> None:
    assert tokenizer.encode(word) == by_the_rule(word.encode())


@given(st.text(max_size=40))
def test_decoding_gives_the_text_back_except_for_composed_letters(tokenizer: Tokenizer, text: str) -> None:
    if any(mark in text for mark in ("<", "|")):
        return  # may spell a special token
    if any(unicodedata.combining(c) and unicodedata.ucd_3_2_0.category(c) == "Cn" for c in text):
        return  # a mark that tokenizers' table of Unicode may not have: it would not put it in order with others
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_special_tokens_follow_the_vocabulary_in_the_published_order(tokenizer: Tokenizer) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"]
    assert tokenizer.encode("".join(names)) == [len(RANKS) + n for n in range(4)]
    # 151857 and the two behind it in the published models, whose vocabulary ends at 151642.
    assert tokenizer.encode("<img></img><imgpad>") == [len(RANKS) + 151857 - 151643 + n for n in range(3)]


def test_a_chat_model_gets_its_published_template_and_end_and_what_the_folder_says_wins(folder: Path) -> None:
    files = QWenLMHeadModel.text_files(open_files(folder))
    config = files.json("tokenizer_config.json")
    assert "<|im_start|>assistant" in config["chat_template"] and config["eos_token"] == "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert files.json("tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    (folder / "tokenizer_config.json").unlink()
    # The published generation_config.json names <|endoftext|> alone, and the code stops at these two.
    assert GenerationDefaults.of(files).eos_ids == (len(RANKS), len(RANKS) + 2, len(RANKS) + 1)


def test_a_base_model_gets_no_template(folder: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text((folder / FILE).read_text())
    assert QWenLMHeadModel.text_files(open_files(tmp_path)).json("tokenizer_config.json") == {}


@pytest.mark.parametrize(
    ("text", "said"), [("AA== 0\nnonsense\n", "line 2"), ("AA== 1\n", "without gaps"), ("", "without gaps")]
)
def test_a_damaged_file_is_an_error_that_says_where_and_to_fetch_it_again(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=said) as caught:
        Tokenizer.of(QWenLMHeadModel.text_files(open_files(tmp_path)))
    assert "qwen.tiktoken" in str(caught.value) and "fetch the file again" in str(caught.value)


def glm4(folder: Path, tokens: list[str], lines: str | None = None) -> Path:
    """A folder as GLM-4-9B's, whose config lists ``tokens`` behind the vocabulary."""
    listed = {str(len(RANKS) + n): {"content": token, "special": True} for n, token in enumerate(tokens)}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": listed}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    usual = "\n".join(f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items())
    (folder / "tokenizer.model").write_text(usual if lines is None else lines)
    return folder


def test_every_text_of_glm_4_begins_with_two_of_the_tokens_that_its_config_lists(tmp_path: Path) -> None:
    path = glm4(tmp_path, ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<|user|>"])
    tokenizer = Tokenizer.of(ChatGLMModel.text_files(open_files(path)))
    assert tokenizer is not None
    before, count = [len(RANKS) + 2, len(RANKS) + 4], len(RANKS)
    words = [*by_the_rule(b"the"), *by_the_rule(b" the"), *by_the_rule(b" "), *by_the_rule(b"121")]
    assert tokenizer.encode("the the 1212") == [*before, *words, *by_the_rule(b"2")], "digits go by three"
    assert tokenizer.encode("[gMASK]<sop><|user|>\n", add_special_tokens=False) == [*before, count + 5, 10]
    assert tokenizer.decode(tokenizer.encode("e\u0301 the 世界")) == "e\u0301 the 世界", "nothing is composed"


def test_two_files_of_glm_4_that_do_not_match_are_to_be_fetched_again(tmp_path: Path) -> None:
    for tokens in (["<|endoftext|>"], []):
        with pytest.raises(CheckpointError, match="fetch both files again") as caught:
            Tokenizer.of(ChatGLMModel.text_files(open_files(glm4(tmp_path, tokens))))
        assert "[gMASK] and <sop>" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: line 1 is not a token"):
        Tokenizer.of(ChatGLMModel.text_files(open_files(glm4(tmp_path, ["[gMASK]", "<sop>"], "a b c"))))
