"""Tokens that a folder's JSON files add to a SentencePiece vocabulary, or find in a text before it. Torch-free.

Three files say them, in the spellings of several years: ``added_tokens_decoder`` of ``tokenizer_config.json`` has ids
and how each is found, ``added_tokens.json`` ids alone; ``tokenizer_config.json`` and ``special_tokens_map.json`` name
the special ones. One that is named, has no id and is no piece is none: the model was made without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError
from evener_models.sentencepiece_bpe import Pieces
from evener_models.tokenizer_json import added_token

_CONFIG, _OLDER, _MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word")


def listed_tokens(files: ModelFiles, pieces: Pieces) -> list[dict[str, Any]]:
    """Entries of ``added_tokens`` of a ``tokenizer.json``.

    Raises:
        CheckpointError: an id is another token's, or ids behind the vocabulary have gaps.
    """
    named = _named(files)
    count = len(pieces.texts)
    found: dict[str, dict[str, Any]] = {}
    for number, entry, file in _numbered(files):
        text = entry["content"]
        if text in found:
            continue
        if number < count and pieces.ids.get(text) != number:
            raise CheckpointError(
                f"{files.where(file)} gives {text!r} id {number}, which is {pieces.texts[number]!r} in "
                f"{files.where('tokenizer.json')}: the files are of different models; fetch both again"
            )
        token = added_token(number, text, special=bool(entry.get("special")) or text in named)
        found[text] = token | {flag: bool(entry.get(flag)) for flag in _FLAGS}
    for text, said in named.items():
        if text not in found and text in pieces.ids:
            found[text] = added_token(pieces.ids[text], text) | {flag: bool(said.get(flag)) for flag in _FLAGS}
    behind = sorted(token["id"] for token in found.values() if token["id"] >= count)
    if behind != list(range(count, count + len(behind))):
        raise CheckpointError(
            f"{files.path}: added tokens have the ids {', '.join(map(str, behind))}, which do not follow the {count} "
            f"pieces of {files.where('tokenizer.json')} one by one: fetch its JSON files again"
        )
    return list(found.values())


def _numbered(files: ModelFiles) -> Iterator[tuple[int, Mapping[str, Any], str]]:
    """Ids, tokens with their flags, and the file that says so."""
    listed = files.json(_CONFIG).get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        yield int(number), entry, _CONFIG
    for text, number in files.json(_OLDER).items():
        yield int(number), {"content": text}, _OLDER


def _named(files: ModelFiles) -> dict[str, Mapping[str, Any]]:
    """Special tokens by text, with their flags where they are said."""
    found: dict[str, Mapping[str, Any]] = {}
    for source in (files.json(_CONFIG), files.json(_MAP)):
        several = source.get("additional_special_tokens") or source.get("extra_special_tokens") or ()
        more = several.values() if isinstance(several, dict) else several
        for value in (*(source.get(name) for name in _NAMES), *more):
            said = value if isinstance(value, dict) else {"content": value}
            if isinstance(said.get("content"), str) and said["content"]:
                found.setdefault(said["content"], said)
    return found
