"""``tokenizer.model`` without ``tokenizer.json``: SentencePiece's own library says which ids and text are right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece_models
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import CheckpointError, TemplateError
from evener.frontend.chat import open_chat
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files
from evener_formats.tokenizers.sentencepiece_bpe import SPACE
from evener_formats.tokenizers.sentencepiece_tokenizer import FILE
from evener_models.baichuan import BaichuanForCausalLM
from evener_models.chatglm import ChatGLMModel
from evener_models.llama import LlamaForCausalLM

BAICHUAN = {"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False, "add_eos_token": False}
CHATGLM = {"tokenizer_class": "ChatGLMTokenizer"}
YI = {"tokenizer_class": "YiTokenizer", "add_bos_token": True}
BEHIND = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CONVERSATION = [
    {"role": "user", "content": "你好呀"}, {"role": "assistant", "content": "  hello, world\n"},
    {"role": "user", "content": "then 12"},
]  # fmt: skip
Folder = Callable[..., Path]

#: Words of the trained text and what is odd about it, and any characters but the mark that SentencePiece makes of
#: spaces; special tokens that come about are asked of elsewhere.
FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            *sentencepiece_models.SYMBOLS, " ", "  ", "    ", " the", "the", "banana", "ananas", "世界", "你好",
            "\n    ", "👋", "é", "<0x0A>", "philosophy", "<re", "bananananas", "aaaaaaa", "''''",
        ]
    ),
    st.characters(exclude_characters=SPACE, exclude_categories=("Cs",)),
)  # fmt: skip
#: Spaces and symbols where they meet.
ODD = (
    "", " ", "  ", " a", "a ", "  the  the   ", "\n", "a\n b", "，a", "a，b", "```\n a```", "<br>the", "<br/>", "<b",
    "12", "---->", "<!---->", "     ", "the      the",
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


def load(path: Path) -> Tokenizer:
    found = Tokenizer.of(LlamaForCausalLM.text_files(open_files(path)))
    assert found is not None
    return found


def chat_ids(path: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    files = LlamaForCausalLM.text_files(open_files(path))
    tokenizer = load(path)
    chat = open_chat(files, tokenizer)
    try:
        return tokenizer.encode(chat.render(messages, **options), add_special_tokens=False)
    finally:
        chat.close()


#: Characters that SentencePiece's rules replace, and no marks that belong to the character before: ``tokenizers``
#: looks the two up as one, SentencePiece each. Nor control characters: of a text of nothing else the rules leave
#: nothing, and SentencePiece the space before it.
REPLACED = st.one_of(
    st.sampled_from(
        [*sentencepiece_models.SYMBOLS, "\r\n", "\r", "\u3000", "（", "ｔｈｅ", "㍿", "①", "…", " the", "  "]
    ),
    *(
        st.characters(min_codepoint=a, max_codepoint=b)
        for a, b in ((32, 126), (174, 383), (0x4E00, 0x9FFF), (0xFF01, 0xFF5E))
    ),
)


def equal_to_the_library(name: str, path: Path, examples: int) -> None:
    tokenizer, library = load(path), sentencepiece_models.library((path / FILE).read_bytes())
    assert tokenizer.vocab_size == library.vocab_size()

    @given(st.lists(REPLACED, max_size=14).map("".join) if name == "other characters" else TEXTS)
    @settings(max_examples=examples, deadline=None)
    def equal(text: str) -> None:
        ids = library.encode(text)
        assert tokenizer.encode(text) == ids, library.id_to_piece(ids)
        if name != "no bytes":  # its library writes a mark of its own for what it does not know
            detokenizer = tokenizer.detokenizer()
            streamed = [*map(detokenizer.push, ids), detokenizer.finish()]
            assert tokenizer.decode(ids) == "".join(streamed) == library.decode(ids)

    equal()
    assert [text for text in ODD if tokenizer.encode(text) != library.encode(text)] == []


@pytest.mark.parametrize("name", sentencepiece_models.OPTIONS)
def test_ids_and_text_are_the_librarys_and_streaming_gives_the_same(name: str, folder: Folder) -> None:
    equal_to_the_library(name, folder(name, BAICHUAN), 15)


@pytest.mark.slow
@pytest.mark.parametrize("name", sentencepiece_models.OPTIONS)
def test_ids_and_text_of_many_more_texts_are_the_librarys(name: str, folder: Folder) -> None:
    equal_to_the_library(name, folder(name, BAICHUAN), 300)


def test_the_test_models_have_the_unusual_pieces_that_the_tests_need(trained: Callable[[str], bytes]) -> None:
    first, second = (sentencepiece_models.library(trained(f"Baichuan {n}")) for n in (1, 2))
    assert first.encode_as_pieces("the，he<br>12\n") == ["▁the", "，", "he", "<br>", "1", "2", "\n"]
    assert second.encode_as_pieces("a   the")[:2] == ["a", "▁▁▁"]
    assert first.encode_as_pieces("👋")[1:] == ["<0xF0>", "<0x9F>", "<0x91>", "<0x8B>"]


def test_baichuan_adds_bos_and_eos_if_its_config_says_so(folder: Folder) -> None:
    text = "the 世界"
    for before, after in ((False, False), (True, False), (False, True), (True, True)):
        path = folder("Baichuan 1", {**BAICHUAN, "add_bos_token": before, "add_eos_token": after})
        ids = sentencepiece_models.library((path / FILE).read_bytes()).encode(text)
        assert load(path).encode(text) == [1] * before + ids + [2] * after
        assert load(path).encode(text, add_special_tokens=False) == ids
    del (config := dict(BAICHUAN))["add_bos_token"]
    assert load(folder("Baichuan 1", config)).encode(text)[0] == 1, "the class puts BOS where nothing is said"
    assert load(path).eos_id == 2


def test_text_between_special_tokens_is_tokenized_separately(folder: Folder) -> None:
    path = folder("Baichuan 1", BAICHUAN)
    library = sentencepiece_models.library((path / FILE).read_bytes())
    assert load(path).encode("the</s>the") == [*library.encode("the"), 2, *library.encode("the")]
    assert load(path).decode(load(path).encode("the</s>the")) == "the the"


def test_a_chat_of_baichuan_is_the_ids_of_its_roles_and_the_messages_read_apart(folder: Folder) -> None:
    library = sentencepiece_models.library((folder("Baichuan 1", BAICHUAN) / FILE).read_bytes())
    user, assistant = (library.piece_to_id(f"<reserved_{n}>") for n in (0, 1))
    path = folder("Baichuan 1", BAICHUAN, generation_config={"user_token_id": user, "assistant_token_id": assistant})
    parts = [library.encode(message["content"]) for message in CONVERSATION]
    wanted = [user, *parts[0], assistant, *parts[1], user, *parts[2]]
    assert chat_ids(path, CONVERSATION) == [*wanted, assistant]
    assert chat_ids(path, CONVERSATION, add_generation_prompt=False) == wanted
    system = {"role": "system", "content": "the weather"}
    assert chat_ids(path, [system, *CONVERSATION]) == [*library.encode("the weather"), *wanted, assistant]
    assert load(path).decode([user, assistant]) == "", "they are no text of an answer"
    with pytest.raises(TemplateError, match="one system message"):
        chat_ids(path, [*CONVERSATION, system])
    with pytest.raises(TemplateError, match="no tools"):
        chat_ids(path, CONVERSATION, tools=[{"type": "function", "function": {"name": "f"}}])


def test_a_base_model_of_baichuan_and_a_folder_with_a_template_of_its_own_get_none(folder: Folder) -> None:
    path = folder("Baichuan 2", BAICHUAN, generation_config={"eos_token_id": 2})
    assert "chat_template" not in BaichuanForCausalLM.text_files(open_files(path)).json("tokenizer_config.json")
    path = folder(
        "Baichuan 2", {**BAICHUAN, "chat_template": "own"},
        generation_config={"user_token_id": 27, "assistant_token_id": 28},
    )  # fmt: skip
    assert BaichuanForCausalLM.text_files(open_files(path)).json("tokenizer_config.json")["chat_template"] == "own"


def test_every_text_of_chatglm_begins_with_two_of_the_tokens_after_its_vocabulary(folder: Folder) -> None:
    path = folder("ChatGLM", CHATGLM)
    library, tokenizer = sentencepiece_models.library((path / FILE).read_bytes()), load(path)
    count = library.vocab_size()
    assert [tokenizer.encode(name, add_special_tokens=False) for name in BEHIND] == [[count + n] for n in range(9)]
    assert tokenizer.encode("你好") == [count + 1, count + 3, *library.encode("你好")]
    assert tokenizer.encode("你好", add_special_tokens=False) == library.encode("你好")
    for word in ("philosophy", "sophia", "isop", "peoples"):
        assert tokenizer.encode(word, add_special_tokens=False) == library.encode(word), "sop is text within a word"
    assert tokenizer.decode([count + 1, count + 3, *library.encode("你好 the"), count + 200]) == "你好 the"


def test_a_chat_of_chatglm_3_is_each_role_an_empty_line_and_the_message_read_apart(folder: Folder) -> None:
    path = folder("ChatGLM", CHATGLM, config={"_name_or_path": "THUDM/chatglm3-6b", "eos_token_id": 2})
    library = sentencepiece_models.library((path / FILE).read_bytes())
    behind = {name: library.vocab_size() + n for n, name in enumerate(BEHIND)}
    # In the published models: 64790, 64792, then <|user|> 30910 13 of "\n", then the message's own ids.
    wanted = [behind["[gMASK]"], behind["sop"]]
    messages = [{"role": "system", "content": "the weather"}, *CONVERSATION, {"role": "tool", "content": "12"}]
    for message in messages:
        role = {"tool": "observation"}.get(message["role"], message["role"])
        wanted += [behind[f"<|{role}|>"], *library.encode("\n"), *library.encode(message["content"])]
    assert chat_ids(path, messages, add_generation_prompt=False) == wanted
    assert chat_ids(path, messages) == [*wanted, behind["<|assistant|>"], *library.encode("\n")]
    files = ChatGLMModel.text_files(open_files(path))
    assert GenerationDefaults.of(files).eos_ids == (2, behind["<|user|>"], behind["<|observation|>"])


def test_a_chat_of_chatglm_2_counts_rounds(folder: Folder) -> None:
    path = folder("ChatGLM", CHATGLM, config={"_name_or_path": "THUDM/chatglm2-6b"})
    count = sentencepiece_models.library((path / FILE).read_bytes()).vocab_size()
    text = "[Round 1]\n\n问：你好呀\n\n答：  hello, world\n\n\n[Round 2]\n\n问：then 12\n\n答："
    library = sentencepiece_models.library((path / FILE).read_bytes())
    assert chat_ids(path, CONVERSATION) == [count + 1, count + 3, *library.encode(text)]
    with pytest.raises(TemplateError, match="first message of user"):
        chat_ids(path, [{"role": "system", "content": "x"}, *CONVERSATION])


def test_a_chatglm_of_no_known_version_gets_no_template(folder: Folder) -> None:
    files = ChatGLMModel.text_files(open_files(folder("ChatGLM", CHATGLM, config={"_name_or_path": "/mine"})))
    assert "chat_template" not in files.json("tokenizer_config.json")


def test_yi_names_its_ends_itself_and_its_control_tokens_are_one_id(folder: Folder) -> None:
    path = folder("Yi", YI)
    library, tokenizer = sentencepiece_models.library((path / FILE).read_bytes()), load(path)
    assert tokenizer.encode("the") == [1, *library.encode("the")] and tokenizer.eos_id == 2
    assert len(tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False)) == 2


def test_an_unknown_tokenizer_class_is_left_alone(folder: Folder) -> None:
    files = open_files(folder("ChatGLM", {"tokenizer_class": "XLNetTokenizer"}))
    assert LlamaForCausalLM.text_files(files) is files


def test_character_rules_can_be_changed_for_one_text(trained: Callable[[str], bytes]) -> None:
    from evener_formats.tokenizers.sentencepiece_charsmap import PrecompiledCharsmap
    from evener_formats.tokenizers.sentencepiece_file import read_model

    rules = PrecompiledCharsmap(read_model(trained("other characters"), "it").characters)
    assert [rules.replacement(text) for text in ("\t", "\n", "，", "ｔ", "t")] == [" ", " ", ",", "t", None]
    rules.keep("\n")
    rules.keep("t")
    rules.keep("，")
    again = PrecompiledCharsmap(rules.to_bytes())
    assert [again.replacement(text) for text in ("\t", "\n", "，", "ｔ", "t")] == [" ", "\n", "，", "t", None]
    assert int.from_bytes(rules.to_bytes()[:4], "little") % 1024 == 0, "no look-up leaves the table"
    for broken in (bytes(4), b"\x08\x00\x00\x00abcd", b"\x03\x00\x00\x00abcd"):
        with pytest.raises(ValueError, match="wrong length"):
            PrecompiledCharsmap(broken)


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda _: b"", "no pieces"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "not a SentencePiece model"),
        (torn, "ends within a field"),
        (lambda data: data + b"\xff", "ends within a number"),
        (lambda _: b"\x08\x01", "a number where bytes belong"),
        (lambda _: b"\x0a\x03\x0a\x01\xff", "utf-8"),
    ],
)
def test_a_broken_file_says_what_is_wrong_and_to_fetch_it_again(
    broken: Callable[[bytes], bytes], said: str, folder: Folder, trained: Callable[[str], bytes]
) -> None:
    path = folder("ChatGLM", CHATGLM)
    (path / FILE).write_bytes(broken(trained("ChatGLM")))
    with pytest.raises(CheckpointError, match=said) as caught:
        load(path)
    assert FILE in str(caught.value) and "fetch the file again" in str(caught.value)


@given(st.binary(max_size=60))
@settings(max_examples=100)
def test_any_bytes_either_load_or_are_refused(data: bytes) -> None:
    from evener_formats.tokenizers.sentencepiece_file import read_model

    try:
        read_model(data, "it")
    except CheckpointError as error:
        assert str(error).startswith("it is ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_type": "unigram"}, "of kind unigram"),
        ({"treat_whitespace_as_suffix": True}, "other spaces"),
    ],
)
def test_an_unsupported_model_is_named_with_what_to_do(options: dict[str, Any], said: str, folder: Folder) -> None:
    path = folder("ChatGLM", CHATGLM)
    (path / FILE).write_bytes(sentencepiece_models.train(**options))
    with pytest.raises(CheckpointError, match=said) as caught:
        load(path)
    assert "tokenizer.json" in str(caught.value)


def test_a_bos_token_that_the_model_lacks_is_an_error_that_names_both_files(folder: Folder) -> None:
    path = folder("Baichuan 1", {**BAICHUAN, "add_bos_token": True, "bos_token": {"content": "<other>"}})
    with pytest.raises(CheckpointError, match=re.escape("no piece '<other>', the bos_token")):
        load(path)
