"""Tokenizers whose folder has SentencePiece's ``tokenizer.model`` and names a class, without ``tokenizer.json``.

No code is run. What the published classes do around SentencePiece is said here, by their names: those of Llama, Gemma,
Baichuan 1 and 2 and Yi put BOS or EOS around a text where ``tokenizer_config.json`` says so, those of ChatGLM 2 and 3
have tokens behind the vocabulary and begin every text with two of them. SentencePiece sees what lies between two
special tokens apart, so each such part gets the space of a text's beginning, where the model wants one; with Llama's
``"legacy": false`` only the part that begins the text does.
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
from evener_models.sentencepiece_added import listed_tokens
from evener_models.sentencepiece_bpe import CONTROL, SPACE, UNKNOWN, USER, Pieces, decoder, spaces
from evener_models.sentencepiece_characters import character_normalizers
from evener_models.sentencepiece_file import SentencePieceModel, read_model
from evener_models.tokenizer_json import added_token, assemble, surround

FILE = "tokenizer.model"
_ENDS = ("bos_token", "eos_token")
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
        may_change: ``legacy`` and ``add_prefix_space`` of ``tokenizer_config.json`` say where spaces are put before.
    """

    names: Mapping[str, str]
    behind: tuple[str, ...]
    before: tuple[str, ...]
    chat: Callable[[ModelFiles, Pieces], Mapping[str, dict[str, Any]]]
    may_change: bool = False


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
_LLAMA_CLASS = _Class({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, (), (), _no_chat, True)
_GEMMA_CLASS = _Class(
    {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}, (), (), _no_chat
)
_CLASSES: Mapping[str, _Class] = {
    "LlamaTokenizer": _LLAMA_CLASS,
    "LlamaTokenizerFast": _LLAMA_CLASS,
    "GemmaTokenizer": _GEMMA_CLASS,
    "GemmaTokenizerFast": _GEMMA_CLASS,
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


def published_files(files: ModelFiles, usual: str) -> ModelFiles:
    """``files`` of a folder with ``tokenizer.model`` and what its tokenizer class would add; others as they are.

    Args:
        usual: the class of folders that name none.
    """
    name = str(files.json("tokenizer_config.json").get("tokenizer_class") or usual)
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
            post_processor=surround(before, {}) if before else surround(*(self._end(end, ids) for end in _ENDS)),
            decoder=decoder(each or first),
        )

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text as it stands, by their ids."""
        pieces, published = self._model.pieces, self._published
        apart = [*pieces.of_type(CONTROL, UNKNOWN), *_chat_ids(self.files, pieces)]
        found = {number: added_token(number, pieces.texts[number]) for number in apart}
        for number, text in enumerate(published.behind, len(pieces.texts)):
            # A word like "sop" is text within another word.
            found[number] = added_token(number, text, single_word=text.isalpha())
        if not published.behind:
            found |= {entry["id"]: entry for entry in listed_tokens(self, pieces)}
        return [found[number] for number in sorted(found)]

    def _prefixes(self) -> tuple[bool, bool]:
        """Whether each part of a text gets a space before it, and whether the first alone does."""
        config = self.files.json("tokenizer_config.json")
        if not self._published.may_change:
            return self._model.prefix, False
        # Null means what is not said.
        said = {key: config.get(key) is not False for key in ("legacy", "add_prefix_space")}
        if said["legacy"]:
            return self._model.prefix and said["add_prefix_space"], False
        if self._model.characters or self._model.fewer_spaces:
            raise CheckpointError(
                f"{self.where(FILE)} replaces characters or leaves out spaces, which is not read together with "
                '"legacy": false of tokenizer_config.json; save the tokenizer as tokenizer.json with its own code, and '
                "put it into the folder"
            )
        return False, said["add_prefix_space"]

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

    def _end(self, name: str, added: Mapping[str, int]) -> dict[str, int]:
        """The token called ``name`` if it is put around a text; ``added``: ids of added tokens."""
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


#: A mark before the first part, whose own spaces are marks already: ``Metaspace`` puts none before what begins with
#: its replacement, so it gets another one, which becomes a mark then.
_FIRST = tuple(
    {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, "split": False}
    for replacement, scheme in ((" ", "first"), (SPACE, "never"))
)


def _split(words: Sequence[str]) -> list[dict[str, Any]]:
    """Cut out the pieces that a user defined: the longest where several begin, and whatever is around them."""
    if not words:
        return []
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    # Between such pieces, what is spelt like a byte's piece would be taken for it: it is cut behind its first sign.
    pattern += rf"|(?:\A|(?<={pattern}))<(?=0x[0-9A-F]{{2}}>(?:\z|{pattern}))"
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
