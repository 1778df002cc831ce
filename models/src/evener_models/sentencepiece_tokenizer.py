"""Tokenizers whose folder has SentencePiece's ``tokenizer.model`` and a class as code, instead of ``tokenizer.json``.

The code is never run. What the published classes do around SentencePiece is said here, by their names: Baichuan 1 and 2
and Yi put BOS or EOS around a text where ``tokenizer_config.json`` says so, ChatGLM 2 and 3 have tokens behind the
vocabulary and begin every text with two of them. SentencePiece sees what lies between two special tokens apart, so
each such part gets the space of a text's beginning.
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
from evener_models.derived_files import DerivedFiles
from evener_models.glm4_tokenizer import Glm4Files
from evener_models.sentencepiece_bpe import CONTROL, UNKNOWN, USER, Pieces, decoder, spaces
from evener_models.sentencepiece_characters import character_normalizers
from evener_models.sentencepiece_file import SentencePieceModel, read_model
from evener_models.tokenizer_json import added_token, assemble, surround

FILE = "tokenizer.model"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

#: A message of the published code is its role's token and its text; a system message has no token.
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
#: The line behind a role's token names a tool; that of a plain answer is empty, which the published code reads off and
#: leaves out.
_CHATGLM_3 = (
    "{% if tools %}{{ raise_exception('tools are not written into the prompt of ChatGLM 3: put their descriptions into "
    "a system message') }}{% endif %}"
    "[gMASK]sop{% for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n "
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class _Class:
    """A published tokenizer class.

    Attributes:
        names: of ``bos_token`` and the like, where the folder names none.
        behind: tokens whose ids follow the vocabulary's.
        before: those of them that begin every text.
        chat: what the folder's files leave to code about chats, by file.
    """

    names: Mapping[str, str]
    behind: tuple[str, ...]
    before: tuple[str, ...]
    chat: Callable[[ModelFiles, Pieces], Mapping[str, dict[str, Any]]]


def _no_chat(files: ModelFiles, pieces: Pieces) -> Mapping[str, dict[str, Any]]:
    del files, pieces
    return {}


def _baichuan_chat(files: ModelFiles, pieces: Pieces) -> Mapping[str, dict[str, Any]]:
    """``generation_config.json`` says the ids that begin messages; base models have none."""
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
    """2 and 3 have equal files; ``_name_or_path`` of the published configs tells them apart."""
    name = str(files.json("config.json").get("_name_or_path")).lower()
    if "chatglm2" in name:
        return {"tokenizer_config.json": {"chat_template": _CHATGLM_2}}
    if "chatglm3" not in name:
        return {}
    count, behind = len(pieces.texts), _CLASSES["ChatGLMTokenizer"].behind
    ends = [pieces.ids[end] for end in ("</s>",) if end in pieces.ids]
    ends += [count + behind.index(role) for role in ("<|user|>", "<|observation|>")]
    return {
        "tokenizer_config.json": {"chat_template": _CHATGLM_3},
        "generation_config.json": {"eos_token_id": ends},
    }


_BAICHUAN_CLASS = _Class({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, (), (), _baichuan_chat)
_CLASSES: Mapping[str, _Class] = {
    "BaiChuanTokenizer": _BAICHUAN_CLASS,
    "BaichuanTokenizer": _BAICHUAN_CLASS,
    "YiTokenizer": _Class(
        {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"}, (), (), _no_chat
    ),
    "ChatGLMTokenizer": _Class(
        {"eos_token": "</s>", "unk_token": "<unk>"},
        ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_ROLES), ("[gMASK]", "sop"), _chatglm_chat,
    ),
}  # fmt: skip


def published_files(files: ModelFiles) -> ModelFiles:
    """``files`` of a folder with ``tokenizer.model`` and what its tokenizer class would add; others as they are."""
    name = str(files.json("tokenizer_config.json").get("tokenizer_class"))
    if not files.names(FILE):
        return files
    if name == "ChatGLM4Tokenizer":
        return Glm4Files(files, FILE)
    return SentencePieceFiles(files, _CLASSES[name]) if name in _CLASSES else files


class SentencePieceFiles(DerivedFiles):
    """A folder's text files with what its own code would add: ``tokenizer.json``, names of special tokens, and the
    template and ends of a chat. What the folder says wins."""

    def __init__(self, files: ModelFiles, published: _Class) -> None:
        super().__init__(files, FILE)
        self._published = published

    def text(self, name: str) -> str | None:
        if name == "tokenizer.json":
            return json.dumps(self._tokenizer())
        added = self._published.chat(self.files, self._model.pieces).get(name, {})
        if name == "generation_config.json" and added:
            return json.dumps(self.files.json(name) | {"eos_token_id": self.ends(added["eos_token_id"])})
        if name == "tokenizer_config.json":
            elsewhere = self.files.json("special_tokens_map.json")
            added = {key: text for key, text in self._published.names.items() if key not in elsewhere} | added
        return json.dumps(added | self.files.json(name)) if added else self.files.text(name)

    @cached_property
    def _model(self) -> SentencePieceModel:
        where = self.files.where(FILE)
        try:
            return read_model((self.path / FILE).read_bytes(), where)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read ({error}); correct its rights or fetch it again") from error

    def _tokenizer(self) -> dict[str, Any]:
        model, count = self._model, len(self._model.pieces.texts)
        pieces = model.pieces
        behind = {text: count + n for n, text in enumerate(self._published.behind)}
        apart = [*pieces.of_type(CONTROL, UNKNOWN), *_chat_ids(self.files, pieces)]
        added = [
            *(added_token(number, pieces.texts[number]) for number in sorted(apart)),
            # A word like "sop" is text within another word.
            *(added_token(number, text, single_word=text.isalpha()) for text, number in behind.items()),
        ]
        words = [pieces.texts[number] for number in pieces.of_type(USER) if number not in apart]
        unknown = pieces.of_type(UNKNOWN)
        before = {text: behind[text] for text in self._published.before}
        return assemble(
            added,
            normalizer={"type": "Sequence", "normalizers": [*self._normalizers(words), *spaces(model.prefix)]},
            pre_tokenizer=_split(words),
            model=pieces.model(pieces.texts[unknown[0]] if unknown else None, whole_words=bool(words)),
            post_processor=surround(before, {}) if before else surround(self._end("bos_token"), self._end("eos_token")),
            decoder=decoder(model.prefix),
        )

    def _normalizers(self, kept: Sequence[str]) -> list[dict[str, Any]]:
        """What happens to characters before spaces are marked; ``kept``: symbols that stay as they are."""
        found: list[dict[str, Any]] = []
        if self._model.characters:
            try:
                found += character_normalizers(self._model.characters, kept)
            except (ValueError, struct.error) as error:
                raise CheckpointError(f"{self.where(FILE)} is broken ({error}); fetch the file again") from error
        if self._model.fewer_spaces:
            for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
                found.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
        return found

    def _end(self, name: str) -> dict[str, int]:
        """The token called ``name`` if it is put around a text."""
        config = self.json("tokenizer_config.json")
        if not config.get(f"add_{name}", name == "bos_token"):
            return {}
        value = config.get(name, self.files.json("special_tokens_map.json").get(name))
        text = value.get("content") if isinstance(value, dict) else value
        number = self._model.pieces.ids.get(str(text))
        if number is None:
            raise CheckpointError(
                f"{self.where(FILE)} has no piece {text!r}, the {name} of tokenizer_config.json: the files are of "
                f'different models: fetch both again, or say "add_{name}": false'
            )
        return {str(text): number}


def _split(words: Sequence[str]) -> dict[str, Any] | None:
    """Cut out the pieces that a user defined: the longest where several begin, and whatever is around them."""
    if not words:
        return None
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
