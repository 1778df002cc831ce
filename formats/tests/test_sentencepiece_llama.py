"""Folders of Llama's and Gemma's classes with ``tokenizer.model`` and no ``tokenizer.json``: ids and text are those of
SentencePiece's own library with what the published classes do around it, which ``Published`` does step by step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece_models
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import CheckpointError
from evener.frontend.chat import open_chat
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files
from evener_formats.tokenizers.sentencepiece_bpe import SPACE
from evener_formats.tokenizers.sentencepiece_tokenizer import FILE
from evener_models.gemma import GemmaForCausalLM
from evener_models.gemma3 import Gemma3ForCausalLM
from evener_models.llama import LlamaForCausalLM
from evener_models.mistral import MistralForCausalLM
from evener_models.mixtral import MixtralForCausalLM

LLAMA = {"tokenizer_class": "LlamaTokenizer"}
NOT_LEGACY = {**LLAMA, "legacy": False}
GEMMA = {"tokenizer_class": "GemmaTokenizer"}
Folder = Callable[..., Path]

#: Words of the trained text, spaces and line ends where they meet special tokens, bytes, and any characters but the
#: mark that SentencePiece makes of spaces.
FRAGMENTS = st.one_of(
    st.sampled_from(
        ["<s>", "</s>", "<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "\n\n"]
    ),
    st.sampled_from(
        [" ", "  ", "    ", " the", "the", "banana", "世界", "你好", "\n", "\t", "👋", "é", "<0x0A>", "<table>"]
    ),
    st.characters(exclude_characters=SPACE, exclude_categories=("Cs",)),
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)
ODD = (
    "", " ", "  ", " a", "a ", "<s>", "<s>a", " <s>a", "<s> a", "a<s>", "a <s>  the", "<s><s>the", "the</s>",
    "</s>\nthe", "  the  the   ", "<0x0A>", "\n<0x0A>\n\n", "<0x0A><0x0A>", "a<0x0A>", "<bos><0x0A><eos>",
    "<|im_start|>the\n<|im_end|> the", "<|im_end|>  the",
)  # fmt: skip


class Published:
    """What the published classes do around the library: texts are cut at special tokens, the longest where several
    begin, and each part between is encoded by itself.

    Args:
        model: the file's bytes.
        special: ids by text.
        legacy: each part is the library's own; False: the first part, unless it is empty, gets a mark, no other does.
    """

    def __init__(self, model: bytes, special: dict[str, int], legacy: bool) -> None:
        self.library = sentencepiece_models.library(model if legacy else sentencepiece_models.without_prefix(model))
        self._special, self._legacy = special, legacy
        words = sorted(special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, words)) + ")")

    def encode(self, text: str) -> list[int]:
        """Ids without BOS and EOS."""
        parts, found = self._cut.split(text), list[int]()
        for number, part in enumerate(parts):
            if number % 2:
                found.append(self._special[part])
            elif part:
                found += self._part(part if self._legacy or number else SPACE + part)
        return found

    def _part(self, text: str) -> list[int]:
        if self._legacy or not text.startswith((SPACE, " ")):
            return list(self.library.encode(text))
        # Spaces at the beginning are lost to some models: so something stands before them, and is taken off.
        before = self.library.encode("<unk>")
        ids = self.library.encode("<unk>" + text)
        assert ids[: len(before)] == before
        return list(ids[len(before) :])


def load(path: Path, family: type[LlamaForCausalLM] = LlamaForCausalLM) -> Tokenizer:
    found = Tokenizer.of(family.text_files(open_files(path)))
    assert found is not None
    return found


def specials(name: str) -> dict[str, int]:
    """Control pieces and the unknown one, by text."""
    library = sentencepiece_models.library(sentencepiece_models.train(**sentencepiece_models.OPTIONS[name]))
    ids = range(library.vocab_size())
    return {library.id_to_piece(n): n for n in ids if library.is_control(n) or library.is_unknown(n)}


def added(count: int, *texts: str, **flags: bool) -> dict[str, Any]:
    """``added_tokens_decoder`` for tokens behind ``count`` pieces."""
    return {str(count + n): {"content": text, "special": True, **flags} for n, text in enumerate(texts)}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", LLAMA),
        ("Llama", NOT_LEGACY),
        ("Llama", {**LLAMA, "legacy": None}),
        ("no bytes", NOT_LEGACY),
        ("fewer spaces", LLAMA),
        ("Gemma", GEMMA),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("legacy", "")),
)
def test_ids_are_the_published_ones_and_text_comes_back_as_it_streams(
    name: str, config: dict[str, Any], folder: Folder
) -> None:
    path = folder(name, config)
    model = (path / FILE).read_bytes()
    count, special = sentencepiece_models.library(model).vocab_size(), specials(name)
    behind = {"<|im_start|>": count, "<|im_end|>": count + 1}
    path = folder(name, {**config, "added_tokens_decoder": added(count, *behind)})
    published = Published(model, {**special, **behind}, config.get("legacy") is not False)
    tokenizer = load(path)
    assert tokenizer.vocab_size == count + 2

    @given(TEXTS)
    @settings(max_examples=60, deadline=None)
    def equal(text: str) -> None:
        ids = published.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        plain = [i for i in ids if i not in special.values() and i < count]
        if name != "no bytes":  # its library writes a mark of its own for what it does not know
            detokenizer = tokenizer.detokenizer()
            streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
            # The prefix that the class puts before a text is no part of it.
            decoded = sentencepiece_models.library(model).decode(plain)
            assert tokenizer.decode(ids) == streamed == decoded, text

    equal()
    assert [text for text in ODD if tokenizer.encode(text, add_special_tokens=False) != published.encode(text)] == []


def test_without_legacy_only_the_first_part_gets_a_space(folder: Folder) -> None:
    tokens = {
        legacy: load(folder("Llama", {**LLAMA, "legacy": legacy})).encode("<s>the</s>the", add_special_tokens=False)
        for legacy in (True, False)
    }
    marked, bare = (sentencepiece_models.library(model).encode("the") for model in both(folder))
    assert tokens == {True: [1, *marked, 2, *marked], False: [1, *bare, 2, *bare]} and marked != bare
    tokenizer = load(folder("Llama", NOT_LEGACY))
    assert tokenizer.encode("the</s>the") == [1, *marked, 2, *bare]
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def both(folder: Folder) -> tuple[bytes, bytes]:
    model = (folder("Llama", LLAMA) / FILE).read_bytes()
    return model, sentencepiece_models.without_prefix(model)


@pytest.mark.parametrize("config", [LLAMA, NOT_LEGACY], ids=["legacy", "not legacy"])
def test_a_config_may_want_no_space_before_a_text(config: dict[str, Any], folder: Folder) -> None:
    _, bare = both(folder)
    tokenizer = load(folder("Llama", {**config, "add_prefix_space": False}))
    for text in ("the", " the", "the</s> the"):
        ids = [i for part in text.split("</s>") for i in (*sentencepiece_models.library(bare).encode(part), 2)][:-1]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text.replace("</s>", "")


@pytest.mark.parametrize(
    ("family", "name", "bos", "eos"),
    [
        (LlamaForCausalLM, "Llama", 1, 2),
        (MistralForCausalLM, "Llama", 1, 2),
        (MixtralForCausalLM, "Llama", 1, 2),
        (GemmaForCausalLM, "Gemma", 2, 1),
        (Gemma3ForCausalLM, "Gemma", 2, 1),
    ],
)
def test_a_folder_that_names_no_class_is_its_familys_and_begins_text_files_with_bos(
    family: type[LlamaForCausalLM], name: str, bos: int, eos: int, folder: Folder
) -> None:
    for config in (None, {"add_bos_token": True, "add_eos_token": True}):
        path = folder(name, config)
        ids = sentencepiece_models.library((path / FILE).read_bytes()).encode("the weather")
        tokenizer = load(path, family)
        assert tokenizer.encode("the weather") == [bos, *ids] + [eos] * (config is not None)
        assert tokenizer.eos_id == eos and tokenizer.decode([bos, *ids, eos]) == "the weather"
    assert load(folder(name, {"add_bos_token": False}), family).encode("the weather") == ids


def test_added_tokens_of_every_spelling_are_found_as_they_stand(folder: Folder) -> None:
    model = (folder("Llama", LLAMA) / FILE).read_bytes()
    library = sentencepiece_models.library(model)
    count, the = library.vocab_size(), library.piece_to_id("▁the")
    older = {
        "added_tokens": {"<|im_end|>": count + 1, "<|im_start|>": count, "<tool>": count + 2},
        "special_tokens_map": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "▁the", "<none>"],
                               "eos_token": {"content": "<|im_end|>", "lstrip": False}},
    }  # fmt: skip
    tokenizer = load(folder("Llama", {**LLAMA, "add_eos_token": True}, **older))
    assert tokenizer.encode("<|im_start|>a<tool>") == [1, count, *library.encode("a"), count + 2, count + 1]
    assert tokenizer.decode([count, *library.encode("a"), count + 2, count + 1]) == "a<tool>", "two are no text"
    assert tokenizer.eos_id == count + 1 and tokenizer.decode([the]) == "", "a piece may be named special, too"
    assert tokenizer.encode("<none>", add_special_tokens=False) == library.encode("<none>"), "nobody gives it an id"


def test_symbols_that_a_config_lists_again_are_still_found_by_the_model(folder: Folder) -> None:
    model = (folder("Gemma", GEMMA) / FILE).read_bytes()
    library = sentencepiece_models.library(model)
    symbols = [library.piece_to_id(text) for text in ("\n\n", "<table>", "▁▁")]
    listed = {str(n): {"content": library.id_to_piece(n), "special": False, "normalized": False} for n in symbols}
    tokenizer = load(folder("Gemma", {**GEMMA, "added_tokens_decoder": listed}))
    for text in ("a  b", "<table>\n\n  the     the", "\n\n\n", "  <table>"):
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)
        assert tokenizer.decode(library.encode(text)) == text


def test_spaces_beside_an_added_token_go_where_its_flags_say_so(folder: Folder) -> None:
    model = (folder("Llama", LLAMA) / FILE).read_bytes()
    library = sentencepiece_models.library(model)
    count = library.vocab_size()
    flags = {"added_tokens_decoder": {**added(count, "<|end|>", rstrip=True, normalized=True),
                                      "2": {"content": "</s>", "special": True, "lstrip": True}}}  # fmt: skip
    tokenizer = load(folder("Llama", {**LLAMA, **flags}))
    ids = tokenizer.encode("the <|end|>\n the  </s> the", add_special_tokens=False)
    assert ids == [*library.encode("the "), count, *library.encode("the"), 2, *library.encode(" the")]


def test_a_template_of_the_folder_is_rendered_and_its_special_tokens_are_ids(folder: Folder) -> None:
    template = "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}"
    path = folder("Llama", {**NOT_LEGACY, "chat_template": template})
    _, bare = both(folder)
    path = folder("Llama", {**NOT_LEGACY, "chat_template": template})
    tokenizer = load(path)
    chat = open_chat(LlamaForCausalLM.text_files(open_files(path)), tokenizer)
    try:
        text = chat.render([{"role": "user", "content": "the weather"}])
    finally:
        chat.close()
    ids = sentencepiece_models.library(bare).encode("[INST] the weather [/INST]")
    assert tokenizer.encode(text, add_special_tokens=False) == [1, *ids, 2]


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (
            {"5": {"content": "<other>"}},
            r"tokenizer_config.json gives '<other>' id 5, which is '.+' in .*tokenizer.model",
        ),
        ({"9999": {"content": "<far>"}}, "have the ids 9999, which do not follow"),
    ],
)
def test_impossible_ids_are_errors_that_name_the_files(listed: dict[str, Any], said: str, folder: Folder) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(folder("Llama", {**LLAMA, "added_tokens_decoder": listed}))


@pytest.mark.parametrize("name", ["fewer spaces", "other characters"])
def test_a_model_that_changes_text_is_refused_if_only_the_first_part_gets_a_space(name: str, folder: Folder) -> None:
    with pytest.raises(CheckpointError, match=r'tokenizer.model replaces .* "legacy": false .*; save the tokenizer as'):
        load(folder(name, NOT_LEGACY))


def test_a_folder_with_tokenizer_json_has_the_tokenizer_of_that_file(folder: Folder, tmp_path: Path) -> None:
    from evener.frontend.settings import _text_files

    def never() -> type[LlamaForCausalLM]:
        raise AssertionError("the family is not asked")

    path = folder("Llama", LLAMA)
    files = LlamaForCausalLM.text_files(open_files(path))
    (tmp_path / "tokenizer.json").write_text(files.text("tokenizer.json") or "")
    assert _text_files(path, never).text("tokenizer.json") == files.text("tokenizer.json")
