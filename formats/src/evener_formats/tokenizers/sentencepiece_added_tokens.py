"""Tokens that a folder's JSON files add to a SentencePiece vocabulary, or that are found in a text first. Torch-free.

They are in three files, in the formats of several years. ``added_tokens_decoder`` in ``tokenizer_config.json`` has ids
and how each token is found; ``added_tokens.json`` has ids only; ``tokenizer_config.json`` and
``special_tokens_map.json`` name the special tokens. A named token without an id that is not a piece either is ignored:
the model was made without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError
from evener_formats.tokenizers.sentencepiece_bpe import Pieces
from evener_formats.tokenizers.tokenizer_json import added_token

_CONFIG, _OLDER, _MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word")


def added_tokens_from_json(files: ModelFiles, pieces: Pieces) -> list[dict[str, Any]]:
    """The entries of ``added_tokens`` in a ``tokenizer.json``.

    Raises:
        CheckpointError: an id belongs to another token, or the ids after the vocabulary have gaps.
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
    """Ids, tokens with their flags, and the file that each is from."""
    listed = files.json(_CONFIG).get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        yield int(number), entry, _CONFIG
    for text, number in files.json(_OLDER).items():
        yield int(number), {"content": text}, _OLDER


def _named(files: ModelFiles) -> dict[str, Mapping[str, Any]]:
    """Special tokens by text, with their flags if the files give any."""
    found: dict[str, Mapping[str, Any]] = {}
    for source in (files.json(_CONFIG), files.json(_MAP)):
        several = source.get("additional_special_tokens") or source.get("extra_special_tokens") or ()
        more = several.values() if isinstance(several, dict) else several
        for value in (*(source.get(name) for name in _NAMES), *more):
            said = value if isinstance(value, dict) else {"content": value}
            if isinstance(said.get("content"), str) and said["content"]:
                found.setdefault(said["content"], said)
    return found
