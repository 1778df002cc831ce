"""The tokenizer of a model folder, by the library ``tokenizers``, or by transformers without ``tokenizer.json``."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.tokenizer import ByteRule, ReadTokenizer, Vocabulary
from evener.errors import CheckpointError, RequestError
from evener_formats.tokenizers.text_bound import most_bytes
from evener_formats.tokenizers.token_bytes import byte_rule
from evener_formats.tokenizers.tokenizer_json import MadeTokenizer

# One text at a time: the library's threads would not help, and they warn when a process is forked.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
#: Names of single special tokens in ``tokenizer_config.json`` and ``special_tokens_map.json``; templates get them.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


@contextlib.contextmanager
def _no_panic() -> Iterator[None]:
    """A panic of the library is no ``Exception`` and would end more than one request."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"the tokenizer failed on this text: {error}", "prompt") from error


class FastVocabulary(Vocabulary):
    """A ``tokenizers.Tokenizer``. Its truncation and padding are switched off."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library

    def encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> list[int]:
        # Not ``encode``, which holds the GIL for as long as it takes.
        with _no_panic():
            return list(self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        with _no_panic():
            return str(self._library.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id)

    def id(self, token: str) -> int | None:
        # A lone surrogate cannot be encoded, so no token has one.
        return self._library.token_to_id(token) if token == token.encode("utf-8", "ignore").decode() else None

    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._library.get_added_tokens_decoder().items() if token.special)

    def size(self) -> int:
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def most_bytes(self, longest: int) -> float:
        return most_bytes(self._library, longest)

    def byte_rule(self) -> ByteRule | None:
        decoder = self._library.decoder
        return None if decoder is None else byte_rule(decoder.__getstate__().decode("utf-8"))


class SlowVocabulary(Vocabulary):
    """A transformers tokenizer that has no fast form."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> list[int]:
        texts = (text,) if isinstance(text, str) else text
        return list(self._library.encode(*texts, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> str | None:
        return self._library.convert_ids_to_tokens(token_id) if 0 <= token_id < self.size() else None

    def id(self, token: str) -> int | None:
        return self._library.get_vocab().get(token)  # type: ignore[no-any-return]

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._library.all_special_ids)

    def size(self) -> int:
        return len(self._library)


def read_tokenizer(files: ModelFiles) -> ReadTokenizer | None:
    """The tokenizer of a model; None if it has none, as in a folder with only ``config.json``.

    Raises:
        CheckpointError: its files cannot be used, or need the extra ``evener[slow-tokenizers]``.
    """
    config = files.json("tokenizer_config.json")
    special = _special_tokens(config, files.json("special_tokens_map.json"))
    made = files.json("tokenizer.json") if isinstance(files, MadeTokenizer) else {}
    text = None if made else files.text("tokenizer.json")
    if made or text is not None:
        try:
            library = tokenizers.Tokenizer.from_str(text) if text is not None else from_parts(made)
        except Exception as error:  # the library raises a bare Exception
            where = files.where("tokenizer.json")
            raise CheckpointError(f"{where} cannot be used ({error}); fetch the file again") from error
        _add_missing(library, config)
        return ReadTokenizer(FastVocabulary(library), special)
    if any(files.names(name) for name in (*_SLOW_FILES, "*.tiktoken")):
        return ReadTokenizer(_through_transformers(files.path), special)
    return None


def use_library() -> None:
    """Make the smallest tokenizer there is. A library's first use asks the system's loader for memory of its thread:
    once torch's libraries are being loaded, a tokenizer that is the first one would wait until they are."""
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).encode("ab")


def from_parts(file: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer of a ``tokenizer.json`` that was not written: as ``Tokenizer.from_str`` of its text makes
    it. Of the model, which must be BPE, the library gets the lists as they are."""
    model, added = dict(file["model"]), file["added_tokens"]
    empty = {**model, "vocab": {}, "merges": []}
    library = tokenizers.Tokenizer.from_str(json.dumps({**file, "model": empty, "added_tokens": []}))
    assert model.pop("type") == "BPE", "converters make no other"
    library.model = tokenizers.models.BPE(**{name: value for name, value in model.items() if value is not None})
    # In runs of one kind: the library takes special and other tokens by two calls.
    for special, run in itertools.groupby(added, key=lambda entry: bool(entry["special"])):
        add = library.add_special_tokens if special else library.add_tokens
        add([tokenizers.AddedToken(**{k: v for k, v in entry.items() if k != "id"}) for entry in run])
    return library


def _special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str | list[str]]:
    """Special tokens by name; ``tokenizer_config.json`` has priority over the older ``special_tokens_map.json``."""
    found: dict[str, str | list[str]] = {}
    for name in SPECIAL_NAMES:
        for source in (config, token_map):
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    for source in (config, token_map):
        more = source.get("additional_special_tokens") or source.get("extra_special_tokens")
        if isinstance(more, list):
            texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in more]
            found.setdefault("additional_special_tokens", [text for text in texts if isinstance(text, str)])
        elif isinstance(more, dict):
            # Newer folders define further named tokens ("image_token": "<image>").
            found.update({name: text for name, text in more.items() if isinstance(text, str)})
    return found


def _add_missing(library: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens that are in ``added_tokens_decoder`` but not in ``tokenizer.json``, in the order of ids.

    Raises:
        CheckpointError: the library gives a token another id than the folder.
    """
    known = library.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    for key, entry in sorted((listed if isinstance(listed, dict) else {}).items(), key=lambda item: int(item[0])):
        token_id, special = int(key), bool(entry.get("special"))
        if token_id in known and known[token_id].content == entry["content"] and known[token_id].special == special:
            continue
        flags = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
        token = tokenizers.AddedToken(entry["content"], special=special, **flags)
        (library.add_special_tokens if special else library.add_tokens)([token])
        got = library.token_to_id(entry["content"])
        if got != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives {entry['content']!r} id {token_id}, but tokenizer.json makes it {got}: "
                "the two files are from different models: fetch both again"
            )


def _through_transformers(model_dir: Path) -> Vocabulary:
    asked = f"{model_dir} has no tokenizer.json, and its other tokenizer files need transformers"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(f"{asked}: pip install 'evener[slow-tokenizers]'") from error
    try:
        library = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its converters may raise anything
        what = "save the tokenizer as tokenizer.json with its own code, and put that into the folder"
        raise CheckpointError(f"{asked}, which cannot read them: {error}; {what}") from error
    backend = getattr(library, "backend_tokenizer", None)
    return SlowVocabulary(library) if backend is None else FastVocabulary(backend)
