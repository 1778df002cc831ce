"""Tokenizers of folders that have SentencePiece's ``tokenizer.model`` and a class name, but no ``tokenizer.json``.

No code of the folder is run. This module describes, by class name, what the published classes do around SentencePiece.
Those of Llama, Gemma, Baichuan 1 and 2 and Yi add BOS or EOS to a text if ``tokenizer_config.json`` says so. Those of
ChatGLM 2 and 3 have tokens after the vocabulary and begin every text with two of them. SentencePiece gets each part of
a text between two special tokens separately, so each part gets the space before a text, if the model adds one; with
Llama's ``"legacy": false`` only the first part of the text does.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError
from evener_formats.tokenizers.derived_files import DerivedFiles
from evener_formats.tokenizers.glm4_tokenizer import Glm4Files
from evener_formats.tokenizers.sentencepiece_added_tokens import added_tokens_from_json
from evener_formats.tokenizers.sentencepiece_bpe import CONTROL, SPACE, UNKNOWN, USER, Pieces, decoder, spaces
from evener_formats.tokenizers.sentencepiece_charsmap import charsmap_normalizers
from evener_formats.tokenizers.sentencepiece_file import SentencePieceModel, read_model
from evener_formats.tokenizers.tokenizer_json import added_token, assemble, template_processing

FILE = "tokenizer.model"
_ENDS = ("bos_token", "eos_token")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

#: In the published code, a message is its role's token and its text; a system message has no token.
_BAICHUAN = (
    "{% if tools %}{{ raise_exception('the published chat format of Baichuan has no tools') }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}USER{% elif message.role == 'assistant' %}ASSISTANT"
    "{% elif message.role != 'system' or not loop.first %}{{ raise_exception('Baichuan takes one system message, the "
    "first, and messages of user and assistant') }}{% endif %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}ASSISTANT{% endif %}"
)
_CHATGLM_2 = (
    "{% if tools %}{{ raise_exception('the published chat format of ChatGLM 2 has no tools') }}{% endif %}"
    "[gMASK]sop{% set round = namespace(number=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set round.number = round.number + 1 %}[Round {{ round.number }}]\n\n问：{{ message.content }}\n\n答："
    "{% elif message.role == 'assistant' %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% else %}"
    "{{ raise_exception('ChatGLM 2 was published without messages of ' ~ message.role ~ ': put their text into the "
    "first message of user') }}{% endif %}{% endfor %}"
)
#: The line after a role's token names a tool. For a plain answer it is empty, and the published code removes it.
_CHATGLM_3 = (
    "{% if tools %}{{ raise_exception('tools are not written into the prompt of ChatGLM 3: put their descriptions into "
    "a system message') }}{% endif %}"
    "[gMASK]sop{% for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n "
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class _TokenizerClass:
    """A published tokenizer class.

    Attributes:
        names: the special tokens (``bos_token``, …) that the folder does not name.
        extra_tokens: tokens whose ids follow the vocabulary's.
        before: those among them that begin every text.
        chat: makes the chat settings that the folder leaves to code, by file.
        configurable_prefix_space: whether ``legacy`` and ``add_prefix_space`` in ``tokenizer_config.json`` say which
            parts of a text get a space before them.
    """

    names: Mapping[str, str]
    extra_tokens: tuple[str, ...]
    before: tuple[str, ...]
    chat: Callable[[ModelFiles, Pieces], Mapping[str, dict[str, Any]]]
    configurable_prefix_space: bool = False


def _no_chat(files: ModelFiles, pieces: Pieces) -> Mapping[str, dict[str, Any]]:
    del files, pieces
    return {}


def _baichuan_chat(files: ModelFiles, pieces: Pieces) -> Mapping[str, dict[str, Any]]:
    """The chat template, with the tokens that ``generation_config.json`` names for roles; base models have none."""
    roles = _chat_ids(files, pieces)
    if not roles:
        return {}
    user, assistant = (pieces.texts[number] for number in roles)
    return {"tokenizer_config.json": {"chat_template": _BAICHUAN.replace("USER", user).replace("ASSISTANT", assistant)}}


def _chat_ids(files: ModelFiles, pieces: Pieces) -> tuple[int, ...]:
    said = files.json("generation_config.json")
    named = (said.get("user_token_id"), said.get("assistant_token_id"))
    ids = tuple(number for number in named if isinstance(number, int) and 0 <= number < len(pieces.texts))
    return ids if len(ids) == len(named) else ()


def _chatglm_chat(files: ModelFiles, pieces: Pieces) -> Mapping[str, dict[str, Any]]:
    """ChatGLM 2 and 3 have equal files; they are told apart by ``_name_or_path`` in ``config.json``."""
    name = str(files.json("config.json").get("_name_or_path")).lower()
    if "chatglm2" in name:
        return {"tokenizer_config.json": {"chat_template": _CHATGLM_2}}
    if "chatglm3" not in name:
        return {}
    count, behind = len(pieces.texts), _CLASSES["ChatGLMTokenizer"].extra_tokens
    ends = [pieces.ids[end] for end in ("</s>",) if end in pieces.ids]
    ends += [count + behind.index(role) for role in ("<|user|>", "<|observation|>")]
    return {
        "tokenizer_config.json": {"chat_template": _CHATGLM_3},
        "generation_config.json": {"eos_token_id": ends},
    }


_BAICHUAN_CLASS = _TokenizerClass(
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, (), (), _baichuan_chat
)
_LLAMA_CLASS = _TokenizerClass({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, (), (), _no_chat, True)
_GEMMA_CLASS = _TokenizerClass(
    {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}, (), (), _no_chat
)
_CLASSES: Mapping[str, _TokenizerClass] = {
    "LlamaTokenizer": _LLAMA_CLASS,
    "LlamaTokenizerFast": _LLAMA_CLASS,
    "GemmaTokenizer": _GEMMA_CLASS,
    "GemmaTokenizerFast": _GEMMA_CLASS,
    "BaiChuanTokenizer": _BAICHUAN_CLASS,
    "BaichuanTokenizer": _BAICHUAN_CLASS,
    "YiTokenizer": _TokenizerClass(
        {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"}, (), (), _no_chat
    ),
    "ChatGLMTokenizer": _TokenizerClass(
        {"eos_token": "</s>", "unk_token": "<unk>"},
        ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_ROLES), ("[gMASK]", "sop"), _chatglm_chat,
    ),
}  # fmt: skip


def published_files(files: ModelFiles, usual: str) -> ModelFiles:
    """The files of a folder with ``tokenizer.model``, with what its tokenizer class adds; other folders' unchanged.

    Args:
        files: of the folder.
        usual: the tokenizer class if the folder names none.
    """
    name = str(files.json("tokenizer_config.json").get("tokenizer_class") or usual)
    if not files.names(FILE):
        return files
    if name == "ChatGLM4Tokenizer":
        return Glm4Files(files, FILE)
    return SentencePieceFiles(files, _CLASSES[name]) if name in _CLASSES else files


class SentencePieceFiles(DerivedFiles):
    """A folder's text files, with what its tokenizer class adds: ``tokenizer.json``, names of special tokens, the chat
    template, and the tokens that end an answer. The folder's own settings win."""

    def __init__(self, files: ModelFiles, published: _TokenizerClass) -> None:
        super().__init__(files, FILE)
        self._published = published

    def text(self, name: str) -> str | None:
        if name == "tokenizer.json":
            return json.dumps(self._tokenizer())
        added = self._published.chat(self.files, self._model.pieces).get(name, {})
        if name == "generation_config.json" and added:
            return json.dumps(self.files.json(name) | {"eos_token_id": self.eos_token_ids(added["eos_token_id"])})
        if name == "tokenizer_config.json":
            elsewhere = self.files.json("special_tokens_map.json")
            added = {key: text for key, text in self._published.names.items() if key not in elsewhere} | added
        return json.dumps(added | self.files.json(name)) if added else self.files.text(name)

    @cached_property
    def _model(self) -> SentencePieceModel:
        where = self.files.where(FILE)
        if not (self.path / FILE).is_file():  # reading a pipe may wait for ever
            raise CheckpointError(f"{where} is not a regular file; put a copy of the model's own file there")
        try:
            return read_model((self.path / FILE).read_bytes(), where)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read ({error}); fix its permissions or fetch it again") from error

    def _tokenizer(self) -> dict[str, Any]:
        pieces = self._model.pieces
        added = self._added()
        ids = {entry["content"]: entry["id"] for entry in added}
        roles = _chat_ids(self.files, pieces)
        words = [pieces.texts[number] for number in pieces.of_type(USER) if number not in roles]
        unknown = pieces.of_type(UNKNOWN)
        each, first = self._prefixes()
        cuts = [*(_FIRST if first else ()), *_split(words)]
        before = {text: ids[text] for text in self._published.before}
        return assemble(
            added,
            normalizer={"type": "Sequence", "normalizers": [*self._normalizers(words), *spaces(each)]},
            pre_tokenizer={"type": "Sequence", "pretokenizers": cuts} if cuts else None,
            model=pieces.model(pieces.texts[unknown[0]] if unknown else None, whole_words=bool(words)),
            post_processor=template_processing(before, {})
            if before
            else template_processing(*(self._end(end, ids) for end in _ENDS)),
            decoder=decoder(each or first),
        )

    def _added(self) -> list[dict[str, Any]]:
        """Entries of ``added_tokens``, by id: tokens that are found in a text before it is normalized."""
        pieces, published = self._model.pieces, self._published
        apart = [*pieces.of_type(CONTROL, UNKNOWN), *_chat_ids(self.files, pieces)]
        found = {number: added_token(number, pieces.texts[number]) for number in apart}
        for number, text in enumerate(published.extra_tokens, len(pieces.texts)):
            # A word like "sop" is not a token inside another word.
            found[number] = added_token(number, text, single_word=text.isalpha())
        if not published.extra_tokens:
            found |= {entry["id"]: entry for entry in added_tokens_from_json(self, pieces)}
        return [found[number] for number in sorted(found)]

    def _prefixes(self) -> tuple[bool, bool]:
        """Whether every part of a text gets a space before it, and whether only the first does."""
        config = self.files.json("tokenizer_config.json")
        if not self._published.configurable_prefix_space:
            return self._model.prefix, False
        # Null is the default, as if the key were missing.
        said = {key: config.get(key) is not False for key in ("legacy", "add_prefix_space")}
        if said["legacy"]:
            return self._model.prefix and said["add_prefix_space"], False
        if self._model.characters or self._model.remove_extra_whitespaces:
            raise CheckpointError(
                f"{self.where(FILE)} replaces characters or removes spaces, which is not supported together with "
                '"legacy": false of tokenizer_config.json; save the tokenizer as tokenizer.json with its own code, and '
                "put it into the folder"
            )
        return False, said["add_prefix_space"]

    def _normalizers(self, kept: Sequence[str]) -> list[dict[str, Any]]:
        """The normalizers of characters, applied before spaces are marked; ``kept``: symbols that are not changed."""
        found: list[dict[str, Any]] = []
        if self._model.characters:
            try:
                found += charsmap_normalizers(self._model.characters, kept)
            except (ValueError, struct.error) as error:
                raise CheckpointError(f"{self.where(FILE)} is broken ({error}); fetch the file again") from error
        if self._model.remove_extra_whitespaces:
            for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
                found.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
        return found

    def _end(self, name: str, added: Mapping[str, int]) -> dict[str, int]:
        """The token called ``name`` with its id, if it is added to a text; ``added``: ids of added tokens."""
        config = self.json("tokenizer_config.json")
        value = config.get(name, self.files.json("special_tokens_map.json").get(name))
        if value is None or not config.get(f"add_{name}", name == "bos_token"):
            return {}
        text = value.get("content") if isinstance(value, dict) else value
        number = added.get(str(text), self._model.pieces.ids.get(str(text)))
        if number is None:
            raise CheckpointError(
                f"{self.where(FILE)} has no piece {text!r}, the {name} of tokenizer_config.json: the files are of "
                f'different models: fetch both again, or say "add_{name}": false'
            )
        return {str(text): number}


#: Adds a mark before the first part, in which spaces are marks already. ``Metaspace`` adds nothing before a text that
#: begins with its replacement, so the first one adds a space, and the second turns it into a mark.
_FIRST = tuple(
    {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, "split": False}
    for replacement, scheme in ((" ", "first"), (SPACE, "never"))
)


def _split(words: Sequence[str]) -> list[dict[str, Any]]:
    """Split a text at user-defined pieces, the longest first where several begin at the same place."""
    if not words:
        return []
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    # Text such as "<0x0A>" between these pieces would be taken for a byte piece, so it is split after its "<".
    pattern += rf"|(?:\A|(?<={pattern}))<(?=0x[0-9A-F]{{2}}>(?:\z|{pattern}))"
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
